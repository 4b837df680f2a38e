"""
The rows of the report, the most telling first. Most are the step of a config (step.py), beside the
plan's; programs.py has the others.
"""

from dataclasses import dataclass

from extras.gpu_report import programs

GPT2 = ["config/train_gpt2.py", "--batch_size=12", "--dtype=bfloat16"]
XL = ["config/train_gpt2_xl.py", "--batch_size=4", "--dtype=bfloat16"]
LLAMA_1B = ["extras/config/llama_1b.py", "--dtype=bfloat16"]
LLAMA_8B = [
    "extras/config/llama3_8b.py", "--batch_size=1", "--block_size=2048", "--dtype=bfloat16",
    "--lora_rank=16", "--frozen_dtype=bfloat16"]
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
    trains_1b: bool = False  # a program that needs the memory of 1B
    needs: str = ""  # why this machine cannot run it


def rows(n, tiny, simulated, nanogpt):
    """The rows for a machine of n GPUs. nanogpt: its directory, or ""."""

    def step(name, proves, keys, *more, gpus=1, seconds=60, **options):
        keys = [*keys, f"--gradient_accumulation_steps={gpus}", *more]
        if tiny:
            keys += [*TINY, *(TINY_LLAMA if "llama" in keys[0] else [])]
        compiled = "--compile=False" not in keys
        if simulated and compiled:
            keys.append("--compile=False")
            if name.endswith(" compiled"):
                options["needs"] = "a simulated GPU has no compiler"
        return Row(name, proves, gpus, seconds, tuple(keys), **options)

    def one(name, proves, keys, *more, **options):
        return step(name, proves, keys, "--strategy=single", *more, **options)

    def sharded(name, proves, *more, **options):
        return step(name, proves, LLAMA_1B, "--strategy=full_shard", *more, gpus=n, seconds=90,
                    **options)

    def other(name, proves, gpus, seconds, program, **options):
        return Row(name, proves, gpus, seconds, program=program, **options)

    pair = min(n, 2)
    two = "" if n >= 2 else "it takes two GPUs"
    even = "" if n % 2 == 0 else "two groups take an even number of GPUs"
    halves = f"--shard_group_size={max(1, n // 2)}"
    flash = (("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1"),)
    first_nccl = (("TORCH_DIST_USE_NCCL2", "0"),)
    uncompiled = "--compile=False"
    return [
        other("minimal.py", "the door opens; its loss is a CPU's", n, 60, programs.minimal),
        one("124M compiled", "target on an H100: 375,000 tokens/s", GPT2, matters=True),
        one("124M", "peak beside the plan's, which does not know what compiling saves", GPT2,
            uncompiled, matters=True),
        other("124M beside nanoGPT", "target: 1.03 x its tokens/s", 1, 240, programs.nanogpt,
              needs="" if nanogpt else "pass --nanogpt=DIR"),
        sharded("1B full_shard", "speed, and the share of the gathers that is hidden", trace=True,
                matters=True),
        step("1B ddp", "the control", LLAMA_1B, "--strategy=ddp", gpus=n, seconds=150, needs=two),
        step("1B shard_grad_op", "ZeRO-2", LLAMA_1B, "--strategy=shard_grad_op", gpus=n,
             trace=True, needs=two),
        step("1B hybrid_shard", "two groups", LLAMA_1B, "--strategy=hybrid_shard", halves, gpus=n,
             needs=two or even),
        one("1B single", "what one GPU does alone", LLAMA_1B, seconds=150),
        other("a rank is killed", "all restart, and end with the same losses", pair, 120,
              programs.killed, matters=True, needs=two),
        other("tests", "python -m pytest -k cuda: what is promised", n, 300, programs.tests,
              matters=True),
        one("XL single", "of the next row", XL, seconds=240),  # a minute or more to compile
        step("XL full_shard on one rank", "target: 1.10 x the time of XL single", XL,
             "--strategy=full_shard", seconds=120),
        sharded("1B uncompiled", "peak beside the plan's", uncompiled),
        sharded("1B selective", "checkpointing", uncompiled,
                "--activation_checkpointing=selective"),
        sharded("1B full", "checkpointing", uncompiled, "--activation_checkpointing=full"),
        sharded("1B full and activations offloaded", "an estimated 10 to 15% slower", uncompiled,
                "--activation_checkpointing=full", "--activation_offload=True"),
        sharded("1B cpu_offload=0.5", "PCIe, and the CPU's update", uncompiled,
                "--cpu_offload=0.5"),
        sharded("1B loss_chunks=0", "what chunks of the loss save", uncompiled, "--loss_chunks=0"),
        sharded("1B prefetch_blocks=1", "whether gathers are hidden better", uncompiled,
                "--prefetch_blocks=1", trace=True),
        one("124M float16", "loss scaling", GPT2, uncompiled, "--dtype=float16"),
        one("XL float8", "against XL single", XL, "--dtype=float8", seconds=240),
        sharded("1B Muon", "its step, and NCCL's memory for all-to-all", uncompiled,
                "--optimizer=muon"),
        step("8B LoRA", "a made base in bf16", LLAMA_8B, uncompiled, "--strategy=full_shard",
             gpus=n, seconds=120),
        other("a full save", "seconds, and seconds in which it blocked training", n, 120,
              programs.full_save, trains_1b=True),
        other("a sharded save", "the same", n, 120, programs.sharded_save, trains_1b=True,
              needs=two),
        one("124M with flash attention", "beside cuDNN's, in 124M", GPT2, uncompiled, env=flash),
        step("1B hybrid_shard with the first NCCL", "TORCH_DIST_USE_NCCL2=0", LLAMA_1B,
             "--strategy=hybrid_shard", halves, gpus=n, env=first_nccl, needs=two or even),
        other("rates", "products, memory, network and host by themselves", n, 60, programs.rates),
    ]
