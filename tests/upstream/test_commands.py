"""
Every command in a ```sh or ```text block of README.md and docs/, as a reader types it: taken from
the page, in the page's order, by a shell in one clone whose path has a space, with the real
launcher, and without PYTHONPATH or OMP_NUM_THREADS. Flags at its end, and nothing else, make it
small. What a page shows as its output must be in its output.

    python -m pytest -q tests/upstream/test_commands.py

RULES says how each is run. The pages of extras/ have rules of their own, beside its tests.
"""

import re

import pytest
from commands import SAMPLE, SIZE, Run, make_clone, pages, read, rule_of, run_page, shown, trains
from harness import flags, read_ckpt

from configurator import load_config, resolve
from ranks import World

BENCH = flags(**SIZE, device="cpu", dtype="float32")
RULES = [  # (a part of commands, what to do with them); the first that fits; None: not here
    ("venv", None), ("pip install", None), ("python -m pytest", None),  # .ci/run, test_contract.py
    ("data/openwebtext", None),  # it loads from the hub
    ("out-b", None),  # its names stand for others
    ("NCCL_", None),  # test_cuda.py trains with these, on one GPU
    ("--nnodes", None), ("TORCH_DISABLE", None),  # two nodes: test_faults.py restarts them
    ("SLURM_", None), ("sbatch", None),
    ("$A", None),  # 13B: test_commands_for_fairseqs_two_resolve
    ("nadam", None), ("=rotary", None), ("gpt2+scale", None),  # test_fork.py has the page's files
    ("my_chats", None),  # extras/docs/finetuning.md has it
    ("minimal.py", Run(exact="2")),
    ("own_model.py", Run(["--steps=10"])),
    ("prepare.py", Run()),
    ("sample.py", SAMPLE),
    ("extras.plan", Run(exact="2", needs="extras")),
    ("extras.to_full", Run()),
    ("--profile", Run(["--steps=1", *BENCH], needs="extras")),
    ("extras.bench", Run(["--steps=1", "--gradient_accumulation_steps=2", *BENCH], needs="extras")),
    ("init_from=resume", trains(4)),
    ("init_from=auto", trains(6)),
    ("shakespeare_char.py", trains(dataset="python_stdlib")),
    ("hybrid_shard", trains(gradient_accumulation_steps=4)),
    ("train.py", trains(shows="step")),
]


def test_commands_have_a_rule():
    for page in pages():
        for command, _ in shown(page):
            rule_of(command, RULES)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    return make_clone(tmp_path_factory.mktemp("a reader"))


@pytest.mark.slow
@pytest.mark.parametrize("page", pages())
def test_commands_run_as_they_stand_on_the_page(clone, page):
    run_page(clone, page, RULES)
    if page == "README.md":  # to_full had a sharded one to make the full one of
        out = clone / "out-quickstart"
        assert (out / "step-000000006" / "header.json").exists()
        assert read_ckpt(out)["iter_num"] == 6


def test_commands_for_fairseqs_two_resolve():
    page = read("docs/migration.md")
    [keys] = re.findall(r'^A="(.*?)"$', page, re.M | re.S)
    for n in ("1", "8"):
        assert f"nproc_per_node={n} train.py $A --gradient_accumulation_steps={n}\n" in page
        argv = [*keys.split(), f"--gradient_accumulation_steps={n}", "--device=cpu"]
        cfg = resolve(load_config(argv), World(size=int(n), local_size=int(n)), True)
        assert (cfg.dtype, cfg.cpu_offload, cfg.loss_scale) == ("float16", 1.0, 4.0)
