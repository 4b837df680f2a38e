"""
The rows of the report, the most telling first. Most are the step of a config (step.py), beside the
plan's; programs.py has the others.
"""

from dataclasses import dataclass

from extras.gpu_report import programs

ORDINARY, RECORDED = "--cuda_graph=False", "--cuda_graph=True"
GPT2 = ["config/train_gpt2.py", "--batch_size=12", "--dtype=bfloat16", ORDINARY]
XL = ["config/train_gpt2_xl.py", "--batch_size=4", "--dtype=bfloat16", ORDINARY]
LLAMA_1B = ["extras/config/llama_1b.py", "--dtype=bfloat16"]
# Where 1B does not fit: GPT-2 medium.
GPT2_350M = [
    "config/train_gpt2.py", "--n_layer=24", "--n_head=16", "--n_embd=1024", "--batch_size=8",
    "--loss_chunks=8", "--dtype=bfloat16"]
FITS_1B = 54e9  # bytes of a GPU: `single` uncompiled takes 45.4 GiB by the plan, and a tenth stays
FITS_FLOAT8 = 8.9  # compute capability
LLAMA_8B = [
    "extras/config/llama3_8b.py", "--model=llama+lora", "--lora_rank=16", "--batch_size=1",
    "--block_size=2048", "--dtype=bfloat16", "--frozen_dtype=bfloat16"]
# Small enough for a simulated GPU, whose attention wants heads of 16.
TINY = [
    "--n_layer=2", "--n_head=3", "--n_embd=48", "--block_size=32", "--batch_size=2",
    "--vocab_size=256"]
TINY_LLAMA = ["--n_kv_head=1", "--n_inner=64"]


@dataclass(frozen=True)
class Row:
    name: str
    proves: str
    gpus: int  # that it takes
    seconds: int  # that it may take at full size; its limit is a minute more than twice as many
    keys: tuple = ()  # of train.py, for a step
    trace: bool = False
    env: tuple = ()  # of (name, value)
    program: object = None  # a function of programs.py, instead of a step
    matters: bool = False  # it is among the first rows of the report
    trains: str = ""  # the row whose memory a program needs
    needs: str = ""  # why this machine cannot run it

    @property
    def has_planned_peak(self):
        """The plan does not know what compiling saves, and what a recording keeps."""
        return "--compile=False" in self.keys and RECORDED not in self.keys


def rows(n, tiny, simulated, nanogpt, gpu=None, torchao="some"):
    """The rows for a machine of n GPUs. nanogpt: its directory, or "". gpu: machine.py's row of
    the smallest GPU. torchao: its version, or None."""
    gpu = gpu or dict(memory=80e9, capability="9.0")
    size, base = ("1B", LLAMA_1B) if gpu["memory"] >= FITS_1B else ("350M", GPT2_350M)
    uncompiled = "--compile=False"
    no_float8 = "" if torchao else "it takes torchao: pip install torchao"
    if float(gpu["capability"]) < FITS_FLOAT8:
        no_float8 = f"float8 takes compute capability 8.9; this GPU has {gpu['capability']}"

    def step(name, proves, keys, *more, gpus=1, seconds=60, **options):
        if uncompiled in more and seconds <= 90:
            seconds //= 2  # an H100 took 9 s for 124M, and 20 for 1B
        keys = [*keys, f"--gradient_accumulation_steps={gpus}", *more]
        if tiny:
            keys += [*TINY, *(TINY_LLAMA if "llama" in keys[0] else [])]
        compiled = uncompiled not in keys
        if simulated and compiled:
            keys.append(uncompiled)
            if name.endswith(" compiled"):
                options["needs"] = "a simulated GPU has no compiler"
        return Row(name, proves, gpus, seconds, tuple(keys), **options)

    def one(name, proves, keys, *more, **options):
        return step(name, proves, keys, "--strategy=single", *more, **options)

    def sharded(name, proves, *more, **options):
        return step(f"{size} {name}", proves, base, "--strategy=full_shard", *more, gpus=n,
                    seconds=90, **options)

    def other(name, proves, gpus, seconds, program, **options):
        return Row(name, proves, gpus, seconds, program=program, **options)

    pair = min(n, 2)
    two = "" if n >= 2 else "it takes two GPUs"
    even = "" if n % 2 == 0 else "two groups take an even number of GPUs"
    halves = f"--shard_group_size={max(1, n // 2)}"
    flash = (("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1"),)
    first_nccl = (("TORCH_DIST_USE_NCCL2", "0"),)
    return [
        other("minimal.py", "the door opens; its loss is a CPU's", n, 60, programs.minimal),
        one("124M compiled", "target on an H100: 375,000 tokens/s", GPT2, matters=True),
        one("124M", "peak beside the plan's, which does not know what compiling saves", GPT2,
            uncompiled, matters=True),
        step("124M full_shard", "of the next row", GPT2, "--strategy=full_shard"),
        step("124M full_shard recorded", "target: the time of 124M compiled", GPT2,
             "--strategy=full_shard", RECORDED, matters=True),
        other("124M beside nanoGPT", "target: 1.03 x its tokens/s", 1, 240, programs.nanogpt,
              needs="" if nanogpt else "pass --nanogpt=DIR"),
        other("Shakespeare to the end", "an outcome: nanoGPT's train.py and ours, side by side", 1,
              300, programs.to_the_end, needs="" if nanogpt else "pass --nanogpt=DIR"),
        sharded("full_shard", "speed, and the share of the gathers that is hidden", trace=True,
                matters=True),
        step(f"{size} ddp", "the control", base, "--strategy=ddp", gpus=n, seconds=150, needs=two),
        step(f"{size} shard_grad_op", "ZeRO-2", base, "--strategy=shard_grad_op", gpus=n,
             trace=True, needs=two),
        step(f"{size} hybrid_shard", "two groups", base, "--strategy=hybrid_shard", halves, gpus=n,
             needs=two or even),
        one(f"{size} single", "what one GPU does alone", base, seconds=150),
        other("a rank is killed", "all restart, and end with the same losses", pair, 120,
              programs.killed, matters=True),
        other("tests", "python -m pytest -k cuda: what is promised", n, 300, programs.tests,
              matters=True),
        # Not compiled: as one graph of 48 blocks it was still compiling when an H100's time was up.
        one("XL single", "of the next row", XL, uncompiled, seconds=120),
        step("XL full_shard uncompiled", "target: 1.10 x the time of XL single", XL,
             "--strategy=full_shard", uncompiled, seconds=120),
        step("XL full_shard recorded", "target: the time of XL single; and its memory", XL,
             "--strategy=full_shard", uncompiled, RECORDED, seconds=120, matters=True),
        step("XL full_shard on one rank", "what compiling by block saves", XL,
             "--strategy=full_shard", seconds=120),
        sharded("recorded", "what the host takes of full_shard", RECORDED),
        sharded("uncompiled", "peak beside the plan's", uncompiled),
        sharded("selective", "checkpointing", uncompiled,
                "--activation_checkpointing=selective"),
        sharded("full", "checkpointing", uncompiled, "--activation_checkpointing=full"),
        sharded("full and activations offloaded", "an estimated 10 to 15% slower", uncompiled,
                "--activation_checkpointing=full", "--activation_offload=True"),
        sharded("cpu_offload=0.5", "PCIe, and the CPU's update", uncompiled,
                "--cpu_offload=0.5"),
        sharded("loss_chunks=0", "what chunks of the loss save", uncompiled, "--loss_chunks=0"),
        sharded("prefetch_blocks=1", "whether gathers are hidden better", uncompiled,
                "--prefetch_blocks=1", trace=True),
        one("124M float16", "loss scaling", GPT2, uncompiled, "--dtype=float16"),
        step("XL float8", "against XL full_shard on one rank", XL, "--strategy=full_shard",
             "--dtype=float8", seconds=240, needs=no_float8),
        sharded("Muon", "its step, and NCCL's memory for all-to-all", uncompiled,
                "--optimizer=muon"),
        step("8B LoRA", "a made base in bf16", LLAMA_8B, uncompiled, "--strategy=full_shard",
             gpus=n, seconds=120),
        other("a full save", "seconds, and seconds in which it blocked training", n, 120,
              programs.full_save, trains=f"{size} uncompiled"),
        other("a sharded save", "the same", n, 120, programs.sharded_save,
              trains=f"{size} uncompiled", needs=two),
        one("124M with flash attention", "beside cuDNN's, in 124M", GPT2, uncompiled, env=flash),
        step(f"{size} hybrid_shard with the first NCCL", "TORCH_DIST_USE_NCCL2=0", base,
             "--strategy=hybrid_shard", halves, gpus=n, env=first_nccl, needs=two or even),
        other("rates", "products, memory, network and host by themselves", n, 60, programs.rates),
    ]
