"""
Throughputs that others published, and the plan's for the same runs.

    python -m extras.plan.published runs.csv    # each row, and the errors by group
    python -m extras.plan.published runs.csv --measured    # when one row sets the rate for others

Rows of each kind are here, for test_timing.py. (The rates of products were chosen with such rows at
hand.) A file with more has the same columns and may have others. tok_s_gpu: tokens per second and
GPU. node: GPUs per node, if they are not 8. offload: as --cpu_offload. Rows that the plan's keys
cannot express are passed over, and named.

Times are linear in depth, so models of 2 and 4 blocks are rehearsed, once for all numbers of GPUs,
as by --world_size=8,16.
"""

import csv
import functools
import sys
from collections import defaultdict
from dataclasses import replace
from itertools import permutations
from statistics import mean, median

from configurator import STRATEGIES, load_config
from extras import plan
from extras.plan import timing
from extras.plan.rehearse import rehearse

# llm-foundry: scripts/train/benchmarking/README.md of mosaicml/llm-foundry, as of that month.
# fms-fsdp: README.md of foundation-model-stack/fms-fsdp, at that commit.
# torchtitan: docs/performance.md of pytorch/torchtitan, as of that month.
# KempnerForge: benchmarks/mfu_scaling of KempnerInstitute/KempnerForge, at that commit.
# fairseq: examples/fully_sharded_data_parallel/README.md, as of that month.
# LambdaLabs: chapter 5 of LambdaLabsML/distributed-training-guide, at that commit.
ROWS = """\
source,model,gpus,gpu,seq,mbs,accum,strategy,ac,compile,attn,dtype,reduce,tok_s_gpu,network,node,offload
llm-foundry 2023-10,mpt-13b,16,h100_80gb,2048,2,1,full_shard,none,0,flash-triton,bf16,fp32,4767,
llm-foundry 2023-10,mpt-13b,32,h100_80gb,2048,2,1,full_shard,none,0,flash-triton,bf16,fp32,4811,
llm-foundry 2023-10,mpt-13b,64,h100_80gb,2048,2,1,full_shard,none,0,flash-triton,bf16,fp32,4800,
llm-foundry 2023-10,mpt-1b,16,h100_80gb,2048,20,1,full_shard,none,0,flash-triton,bf16,fp32,46037,
llm-foundry 2023-10,mpt-1b,32,h100_80gb,2048,20,1,full_shard,none,0,flash-triton,bf16,fp32,45130,
llm-foundry 2023-10,mpt-1b,64,h100_80gb,2048,20,1,full_shard,none,0,flash-triton,bf16,fp32,44402,
llm-foundry 2023-10,mpt-7b,8,a100_80gb,4096,16,2,full_shard,full,0,flash-triton,bf16,fp32,3684,
llm-foundry 2024-01,mpt-3b,128,h100_80gb,2048,8,1,shard_grad_op,none,0,flash2,bf16,fp32,23422,
llm-foundry 2023-05,mpt-760m,16,a100_40gb,2048,12,1,full_shard,none,0,flash-triton,bf16,bf16,29607,
llm-foundry 2023-05,mpt-760m,32,a100_40gb,2048,12,1,full_shard,none,0,flash-triton,bf16,bf16,29648,
llm-foundry 2023-05,mpt-760m,64,a100_40gb,2048,12,1,full_shard,none,0,flash-triton,bf16,bf16,29344,
llm-foundry 2023-05,mpt-760m,128,a100_40gb,2048,12,1,full_shard,none,0,flash-triton,bf16,bf16,28940,
llm-foundry 2023-05,mpt-3b,32,a100_40gb,2048,6,1,full_shard,none,0,flash-triton,bf16,bf16,9914,
llm-foundry 2023-05,mpt-3b,64,a100_40gb,2048,6,1,full_shard,none,0,flash-triton,bf16,bf16,9736,
llm-foundry 2023-05,mpt-3b,128,a100_40gb,2048,6,1,full_shard,none,0,flash-triton,bf16,bf16,9538,
torchtitan 2024-04,llama3-8b,64,a100_80gb,8192,1,1,full_shard,selective_op,0,sdpa,bf16,fp32,2973,
fms-fsdp cf6e42c,llama2-7b,96,h100_80gb,4096,2,1,hybrid_shard,none,0,sdpa,bf16,bf16,7500,800 a node
fms-fsdp ed74fd5,llama2-7b,96,h100_80gb,4096,2,1,hybrid_shard,none,1,sdpa,bf16,bf16,9600,800 a node
fms-fsdp cf6e42c,llama2-7b,128,a100_80gb,4096,2,1,hybrid_shard,none,0,sdpa,bf16,bf16,3650,400 a node
fms-fsdp ed74fd5,llama2-7b,128,a100_80gb,4096,2,1,hybrid_shard,none,1,sdpa,bf16,bf16,4550,400 a node
KempnerForge 01b461a,llama3-8b,2,h200,4096,2,4,full_shard,full,1,sdpa,bf16,fp32,9364,,4
KempnerForge 01b461a,llama3-8b,4,h200,4096,4,2,full_shard,full,1,sdpa,bf16,fp32,9746,,4
KempnerForge 01b461a,llama3-15b,8,h200,4096,4,4,full_shard,full,0,sdpa,bf16,fp32,4426,,4
fairseq 2021-03,gpt3-13b,1,v100,2048,8,1,full_shard,full,0,written out,fp16,fp16,302,,8,1.0
fairseq 2021-03,gpt3-13b,8,v100,2048,8,1,full_shard,full,0,written out,fp16,fp16,407,,8,1.0
LambdaLabs 1fbe39a,llama3-405b,64,h100_80gb,4096,1,1,full_shard,full,0,flash2,bf16,bf16,137,,8,1.0
"""

# width, heads, layers (llm-foundry's yaml files; GPT-3's table)
GPT = {
    "mpt-125m": (768, 12, 12), "mpt-350m": (1024, 16, 24), "mpt-760m": (1536, 12, 24),
    "mpt-1b": (2048, 16, 24), "mpt-3b": (2560, 20, 32), "mpt-7b": (4096, 32, 32),
    "mpt-13b": (5120, 40, 40), "mpt-30b": (7168, 56, 48), "mpt-70b": (8192, 64, 80),
    "gpt2-124m": (768, 12, 12), "gpt3-1.3b": (2048, 16, 24), "gpt3-2.7b": (2560, 20, 32),
    "gpt3-13b": (5120, 40, 40),
}
# width, heads, of them for keys and values, layers, inner width, vocabulary (their config.json)
LLAMA = {
    "llama2-7b": (4096, 32, 32, 32, 11008, 32000), "llama2-13b": (5120, 40, 40, 40, 13824, 32000),
    "llama-34b": (8192, 64, 8, 48, 22016, 32000), "llama2-70b": (8192, 64, 8, 80, 28672, 32000),
    "llama3-8b": (4096, 32, 8, 32, 14336, 128256), "llama3-70b": (8192, 64, 8, 80, 28672, 128256),
    "tinyllama-1.1b": (2048, 32, 4, 22, 5632, 32000),
    "llama3-15b": (5120, 40, 8, 40, 17920, 128256),
    "llama3-405b": (16384, 128, 8, 126, 53248, 128256),
}
GPU = {
    "v100": "V100", "a100_40gb": "A100-40", "a100_80gb": "A100", "h100_80gb": "H100",
    "h200": "H200", "h100_96gb_500w": "989:2.4:360", "b200_limited": "B200",
}
DTYPE = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8", "fp32": "float32"}
CHECKPOINTING = {"none": "none", "full": "full", "selective_op": "selective"}
# How the names of attention kernels begin. The first flash attention was as fast as Triton's.
ATTENTION = {
    "flash-triton": "triton", "flash1": "triton", "flash2": "flash2", "sdpa": "flash2",
    "cudnn": "cudnn", "written out": "written_out",
}
FULL_POWER = ("a100_40gb", "a100_80gb", "h100_80gb", "h200")


def rows(file):
    return list(csv.DictReader(file))


def unknown(row):
    """["column=value"] of what the plan's keys cannot express, such as checkpointing in a part of
    the blocks."""
    tables = dict(
        model={**GPT, **LLAMA}, gpu=GPU, dtype=DTYPE, ac=CHECKPOINTING, strategy=STRATEGIES)
    if row["strategy"] != "single":
        tables["reduce"] = DTYPE
    found = [f"{key}={row[key]}" for key, table in tables.items() if row[key] not in table]
    if not attention(row["attn"]):
        found.append(f"attn={row['attn']}")
    return found


def arguments(row):
    """plan's arguments for this row."""
    ranks = int(row["gpus"])
    keys = dict(
        block_size=row["seq"],
        batch_size=row["mbs"],
        gradient_accumulation_steps=ranks * int(row["accum"]),
        strategy=row["strategy"],
        activation_checkpointing=CHECKPOINTING[row["ac"]],
        compile=is_fused(row),
        dtype=DTYPE[row["dtype"]],
        world_size=ranks,
        gpu=GPU[row["gpu"]],
        gpus_per_node=row.get("node") or 8,
        cpu_offload=row.get("offload") or 0.0,
        attention=attention(row["attn"]),
    )
    if STRATEGIES[row["strategy"]].sharded:  # ddp's gradients have the parameters' type, fp32
        keys["reduce_dtype"] = DTYPE[row["reduce"]]
    if network(row["network"]):
        keys["network"] = network(row["network"])
    return [f"--{key}={value}" for key, value in {**model(row["model"]), **keys}.items()]


def is_fused(row):
    """TransformerEngine casts to 8 bits in one kernel, with and without a compiler. torchao needs
    one for that: else it has ten, which each read and write everything."""
    return row["compile"] == "1" or row["dtype"] == "fp8"


def model(name):
    if name in GPT:
        width, heads, layers = GPT[name]
        keys = dict(n_embd=width, n_head=heads, n_layer=layers, bias=name != "gpt2-124m")
        return dict(keys, vocab_size=50368 if name.startswith("mpt") else 50304)
    names = ("n_embd", "n_head", "n_kv_head", "n_layer", "n_inner", "vocab_size")
    return dict(model="llama", **dict(zip(names, LLAMA[name])), tie_embeddings=False)


def attention(name):
    """The kernel of plan's --attention; None if it has none of that name."""
    for start, kernel in ATTENTION.items():
        if name.startswith(start):
            return kernel
    return None


def network(text):
    """Gb/s per GPU; None if the row does not say."""
    if not text[:1].isdigit():
        return None
    rate = int(text.split()[0])
    return rate / 8 if "a node" in text else rate


def predicted(row, products=None):
    """(tokens/s per GPU, the exposed share of the step). products: the share of the peak that
    matrix products reach, if not the GPU's."""
    machine, _ = plan.parse(arguments(row))
    gpu = machine.cluster.gpu
    gpu = replace(gpu, products=products or gpu.products)
    cluster = replace(machine.cluster, gpu=gpu, compiled=is_fused(row))
    ranks, micro_batches = int(row["gpus"]), int(row["accum"])
    same = [row.get(key) for key in SAME]
    # One rank gathers nothing, so its copies from the host are not on a stream of their own.
    size = 1 if ranks == 1 else 16
    on_gpu, on_host, waited = [], [], []
    for depth in (2, 4):
        program, cfg = rehearsed(depth, min(micro_batches, 2), size, *same)
        sharded = STRATEGIES[cfg.strategy].sharded and not cfg.shard_group_size
        program = timing.grown(program, ranks / size, [cfg.shard_group_size], rows=sharded)
        step = timing.run(program, cluster, micro_batches)
        on_gpu.append(step.on_gpu)
        on_host.append(step.on_host)
        waited.append(step.exposed * step.seconds)
    layers = model(row["model"])["n_layer"]
    parts = (on_gpu, on_host, waited)
    on_gpu, on_host, exposed = [a + (b - a) * (layers - 2) / 2 for a, b in parts]
    whole = max(on_gpu, on_host)
    return micro_batches * int(row["mbs"]) * int(row["seq"]) / whole, exposed / whole


# The columns that a rehearsal depends on: not the GPU, nor the number of GPUs.
SAME = ("model", "seq", "mbs", "strategy", "ac", "dtype", "reduce", "attn", "offload")


@functools.cache
def rehearsed(depth, micro_batches, size, *same):
    """(program, cfg) of the model with `depth` blocks on `size` GPUs."""
    row = dict(zip(SAME, same), compile="0", gpu="h100_80gb", network="", accum=str(micro_batches))
    machine, rest = plan.parse(arguments(dict(row, gpus=str(size))))
    cfg = load_config([*rest, f"--n_layer={depth}"])
    cfg, world = plan.place(replace(cfg, strategy=row["strategy"]), size, machine)
    *_, program = rehearse(cfg, world, machine.attention)
    return program, cfg


def groups(row, exposed):
    """The lines of the table that count a row."""
    if row["dtype"] == "fp8":
        return [f"float8: {row['gpu']}"]
    if float(row.get("offload") or 0):
        return ["offload"]
    if row["gpu"] not in FULL_POWER:
        return [f"below full power: {row['gpu']}"]
    found = ["all in bf16", row["gpu"], row["source"]]
    if 8 <= int(row["gpus"]) <= 128:
        found.append("on 8 to 128 GPUs")
    else:
        found.append("on fewer or more")
    if exposed > 0.05:
        found.append("more than 5% exposed")
    return found


def main(path):
    ratios = defaultdict(list)
    for row in expressible(path):
        rate, exposed = predicted(row)
        ratio = rate / float(row["tok_s_gpu"])
        keys = ("source", "model", "gpus", "gpu", "seq", "mbs", "strategy", "ac", "compile")
        print(f"{ratio:.2f}  {exposed:6.1%}  " + " ".join(row[key] for key in keys), flush=True)
        for group in groups(row, exposed):
            ratios[group].append(ratio)
    print_table(ratios)


def expressible(path):
    """The rows of a file that the plan's keys can express. A line names each other one, and why."""
    found = []
    for row in rows(open(path)):
        reasons = unknown(row)
        if reasons:
            print(f"passed over {row['source']}, {row['gpus']} GPUs: {', '.join(reasons)}")
        else:
            found.append(row)
    return found


def print_table(ratios):
    print("\n| | rows | median | mean error | within 15% | within 25% |\n|---|---|---|---|---|---|")
    for group, found in ratios.items():
        print(f"| {group} | {len(found)} | {median(found):.2f} | {error(found):.1%} | "
              f"{within(0.15, found):.0%} | {within(0.25, found):.0%} |")


def measured(path):
    """As plan's --measured: each row sets the rate of products, and the other rows of its source
    and GPU are predicted by it."""
    ratios = defaultdict(list)
    rows_in_bf16 = [row for row in expressible(path) if row["dtype"] == "bf16"]
    known = [row for row in rows_in_bf16 if row["gpu"] in FULL_POWER]
    share = {id(row): fitted(row) for row in known}
    without = {id(row): predicted(row)[0] for row in known}
    for one, other in permutations(known, 2):
        if any(one[key] != other[key] for key in ("source", "gpu")):
            continue
        differs = {key for key in other if key != "gpus" and one[key] != other[key]}
        kind = "another model"
        if one["model"] == other["model"]:
            kind = "other GPUs alone" if differs <= {"tok_s_gpu", "mfu"} else "the same model"
        published = float(other["tok_s_gpu"])
        ratios[f"{kind}: as it is"].append(without[id(other)] / published)
        ratios[f"{kind}: --measured"].append(predicted(other, share[id(one)])[0] / published)
    print_table(dict(sorted(ratios.items())))


def fitted(row):
    """The share of the peak, at most 1, that makes the row as fast as it was published."""
    low, high = 0.05, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        if predicted(row, middle)[0] < float(row["tok_s_gpu"]):
            low = middle
        else:
            high = middle
    return high


def error(ratios):
    return mean(abs(ratio - 1) for ratio in ratios)


def within(limit, ratios):
    return mean(abs(ratio - 1) <= limit for ratio in ratios)


if __name__ == "__main__":
    if "--measured" in sys.argv:
        measured(sys.argv[1])
    else:
        main(sys.argv[1])
