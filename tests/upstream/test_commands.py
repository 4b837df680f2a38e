"""
Every command in a ```sh or ```text block of README.md and docs/, as a reader types it: taken from
the page, in the page's order, by a shell in one clone whose path has a space, with the real
launcher, and without PYTHONPATH or OMP_NUM_THREADS. Flags at its end, and nothing else, make it
small. What a page shows as its output must be in its output, and what runs on several ranks must
have the losses of one process.

    python -m pytest -q tests/upstream/test_commands.py

ROWS says which command is run, which is run elsewhere, and which is not, and why. The pages of
extras/ have a table of their own, beside its tests.
"""

import os
import platform
import re

import pytest
from commands import (
    INSTALL,
    NETWORK,
    SAMPLE,
    SIZE,
    Not,
    Run,
    in_the_table,
    make_clone,
    pages,
    prints,
    read,
    run_page,
    trains,
    typed_elsewhere,
)
from harness import flags, losses, read_ckpt

from configurator import load_config, resolve
from ranks import World

SLURM = Not("it needs Slurm; test_faults.py restarts two nodes as the script does")
FORK = Not("it takes a file of the page: test_fork_a_file_adds_an_optimizer")
SCALE = Not(
    "it takes a file of the page: "
    "test_fork_an_adapter_begins_as_its_base_and_trains_only_scales")
ONE_GPU = Not("test_cuda_page_starts_two_nodes_on_one_gpu")
FAIRSEQ = Not("13B: test_commands_for_fairseqs_two_resolve")
COPIES = Not("its names stand for others; test_checkpoint.py goes on from a copied milestone")

OWN = Run(["--steps=10"])


def bench(**keys):
    more = flags(**SIZE, device="cpu", dtype="float32", **keys)
    return Run(["--steps=1", *more], needs="extras")


LOSSES = Run()  # whole, and test_commands_table_of_losses compares what they leave

# {page: [(how a command begins, what to do with it)]}, in the page's order
ROWS = {
    "README.md": [
        ("python3 -m venv .venv", INSTALL),
        (". .venv/bin/activate", INSTALL),
        ("pip install -r requirements.txt", INSTALL),
        ("torchrun --standalone --nproc_per_node=2 minimal.py", Run(exact="2")),
        ("python data/python_stdlib/prepare.py", Run()),
        ("torchrun --standalone --nproc_per_node=2 train.py config/quickstart.py",
         trains(2, shows="step")),
        ("python sample.py --out_dir=out-quickstart", SAMPLE),
        ("torchrun --standalone --nproc_per_node=2 docs/own_model.py", OWN),
        ("torchrun --standalone --nproc_per_node=2 docs/own_model.py --plain", OWN),
        ("python -m extras.plan extras/config/llama2_7b.py --world_size=8",
         Run(exact="2", needs="extras")),
        ("python data/openwebtext/prepare.py --limit=10000", NETWORK),
        ("python data/prepare.py my_data notes/*.txt", Run()),
        ("python train.py config/quickstart.py --dataset=my_data", trains()),
        ("python train.py config/quickstart.py --init_from=resume", trains(4)),
        ("torchrun --standalone --nproc_per_node=2 train.py config/quickstart.py --init_from=auto",
         trains(6)),
        ("python saves.py full out-quickstart", Run()),
        ("python3 -m venv .venv", INSTALL),
        (". .venv/bin/activate", INSTALL),
        ("pip install -r requirements.txt pytest-xdist", INSTALL),
        ("python -m pytest -q -n 2 --dist loadfile", INSTALL),
    ],
    "docs/checkpoints.md": [
        ("mkdir out-b", COPIES),
        ("cp -r out/step-000010000", COPIES),
        ("mkdir out-b", COPIES),
        ("cp out/step-000010000.pt", COPIES),
        ("python train.py CONFIG --out_dir=out-b", COPIES),
    ],
    "docs/clusters.md": [
        ("torchrun --standalone --nproc_per_node=4 train.py config/quickstart.py",
         trains(gradient_accumulation_steps=4)),
        ("export NCCL_SOCKET_IFNAME", ONE_GPU),
        ("NCCL_HOSTID=a torchrun", ONE_GPU),
        ("NCCL_HOSTID=b torchrun", ONE_GPU),
        ("export TORCH_DISABLE", Not("for the next line")),
        ("torchrun --nnodes=2", Not("two nodes: test_fault_a_dead_node_comes_back")),
        ("torchrun --standalone --nproc_per_node=2 --tee=3", trains()),
        ("export TORCH_DISABLE", SLURM),
        ("export PYTORCH_ALLOC", SLURM),
        ("head=$(scontrol", SLURM),
        ("srun --kill-on-bad-exit", SLURM),
        ("for i in 1 2 3", SLURM),
    ],
    "docs/data.md": [
        ("python -m extras.masks my_chats rows.jsonl", Not("extras/docs/finetuning.md has it")),
    ],
    "docs/fork.md": [
        ("python -m pytest -q tests/test_optimizer.py --optimizer=nadam", FORK),
        ("python train.py config/quickstart.py --optimizer=nadam", FORK),
        ("python train.py config/quickstart.py --model=gpt2+scale", SCALE),
    ],
    "docs/fsdp.md": [
        ("python train.py config/quickstart.py --dtype=float32", LOSSES),
        ("for strategy in ddp shard_grad_op full_shard; do torchrun", LOSSES),
    ],
    "docs/measurements.md": [
        ("torchrun --standalone --nproc_per_node=2 -m extras.bench config/quickstart.py",
         bench(gradient_accumulation_steps=2)),
        ("python -m extras.bench config/quickstart.py --steps=3 --profile", bench()),
        ("python train.py config/train_shakespeare_char.py", trains(dataset="python_stdlib")),
    ],
    "docs/migration.md": [
        ("torchrun --standalone --nproc_per_node=1 train.py $A", FAIRSEQ),
        ("torchrun --standalone --nproc_per_node=8 train.py $A", FAIRSEQ),
    ],
    "docs/model_file.md": [
        ("python -m pytest -q tests/test_contract.py --model=NAME",
         Not("test_contract_examples.py, with a copy of model.py")),
        ("python -m pytest -q tests/test_contract.py --model=NAME --ranks",
         Not("test_contract.py, with files of its own")),
    ],
    "docs/switches.md": [
        ("torchrun --standalone --nproc_per_node=2", trains()),
        ("torchrun --standalone --nproc_per_node=2", trains()),
        ("torchrun --standalone --nproc_per_node=2", trains()),
        ("torchrun --standalone --nproc_per_node=2", trains(tolerance=1e-3)),
    ],
}


def test_commands_are_all_in_the_table():
    in_the_table(ROWS, pages())


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    return make_clone(tmp_path_factory.mktemp("a reader"))


def test_commands_of_the_first_block_run_as_they_stand(clone):
    """README's, up to its sample: minimal.py, data, a run on two ranks, text."""
    rows = [row for _, row in ROWS["README.md"]]
    run_page(clone, "README.md", ROWS["README.md"][:rows.index(SAMPLE) + 1])


@pytest.mark.slow
@pytest.mark.parametrize("page", ROWS)
def test_commands_run_as_they_stand_on_the_page(clone, page):
    run_page(clone, page, ROWS[page])
    if page == "README.md":  # checkpoint.py had a sharded one to make the full one of
        out = clone / "out-quickstart"
        assert (out / "step-000000006" / "header.json").exists()
        assert read_ckpt(out)["iter_num"] == 6


@pytest.mark.slow
def test_commands_table_of_losses(clone):
    """The four runs of docs/fsdp.md have its losses, all four alike. Another Python has other
    data."""
    page = read("docs/fsdp.md")
    table = re.findall(r"^\| (\d+) \| ([\d.]+) \| (.*) \|$", page, re.M)
    assert [int(step) for step, *_ in table] == [0, 40]
    assert all(set(others.split(" | ")) == {first} for _, first, others in table)
    names = ("single", "ddp", "shard_grad_op", "full_shard")
    runs = [losses(clone / f"out-{name}") for name in names]
    for run in runs:
        assert run == pytest.approx(runs[0], abs=1e-5)
    if f"Python {platform.python_version()}'s standard library" in page:
        for step, first, _ in table:  # of the losses every tenth is logged
            assert runs[0][int(step) // 10] == pytest.approx(float(first), abs=2e-4)


def test_commands_for_fairseqs_two_resolve():
    page = read("docs/migration.md")
    [keys] = re.findall(r'^A="(.*?)"$', page, re.M | re.S)
    for n in ("1", "8"):
        assert f"nproc_per_node={n} train.py $A --gradient_accumulation_steps={n}\n" in page
        argv = [*keys.split(), f"--gradient_accumulation_steps={n}", "--device=cpu"]
        cfg = resolve(load_config(argv), World(size=int(n), local_size=int(n)), True)
        assert (cfg.dtype, cfg.cpu_offload, cfg.loss_scale) == ("float16", 1.0, 4.0)


def test_commands_that_print_something_else_are_seen():
    out = "GiB  peak  fits\nsingle  1.50  2.50  no\nddp  1.50  3.00  yes\n"
    prints(out, "GiB fits\n...\nsingle 1.50 no\nddp 3.00 yes\n")
    prints(out, "single 9.99 no\n", exact=False)
    for wrong in ("single 1.51 no", "ddp no", "ddp 3.00 yes\nsingle 1.50 no", "full_shard"):
        with pytest.raises(pytest.fail.Exception):
            prints(out, wrong)


@pytest.mark.slow
def test_commands_work_from_another_directory(clone, tmp_path):
    typed_elsewhere(
        clone, tmp_path,
        "python {here}/sample.py --out_dir=out --max_new_tokens=3 --num_samples=1 --device=cpu",
        "python {here}/saves.py full out")
    assert sorted(os.listdir(tmp_path)) == ["out", "out.lock", "words"]
