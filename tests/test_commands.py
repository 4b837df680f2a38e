"""
Every command in a ```sh or ```text block of README.md and docs/, as a reader types it: taken from
the page, in the page's order, by a shell in one clone whose path has a space, with the real
launcher, and without PYTHONPATH or OMP_NUM_THREADS. Flags at its end, and nothing else, make it
small. What a page shows as its output must be in its output, and what runs on several ranks must
have the losses of one process.

    python -m pytest -q tests/test_commands.py

ROWS says which command is run, which is run elsewhere, and which is not, and why.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import pytest
import torch
from harness import HERE, Ranks, cannot_simulate, copied, flags, losses, make_data, of_ours

import train
from configurator import load_config
from data import loader

pytestmark = of_ours
PAGES = ["README.md", *sorted(glob("docs/*.md", root_dir=HERE))]
PROGRAMS = ("python", "python3", "torchrun", "pip", "git", "mkdir", "srun", "sbatch", "lm_eval",
            "export", "for", "cp", "rm", "cd", ".", "vllm", "hf")


# ---------- what the pages say ------------------------------------------------


def read(path):
    with open(os.path.join(HERE, path), encoding="utf-8") as f:
        return f.read()


def commands_of(text):
    """The commands of a block, each in one line; [] if it is something else, such as output."""
    commands, unfinished = [], ""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        unfinished += line
        try:
            words = shlex.split(unfinished, comments=True)
        except ValueError:  # a quotation goes on in the next line
            unfinished += "\n"
            continue
        unfinished, line = "", unfinished
        program = next((word for word in words if "=" not in word), "")
        if program in PROGRAMS or (words and "=$(" in words[0]):
            line = re.sub(r"\s+# .*", "", line)  # flags come at the end
            commands += [part.strip() for part in line.split("&&")]
    return commands


def shown(page):
    """[(command, the output that the page shows under it)]. Of several commands in a block the
    last one that trains, or else the last one, has printed it."""
    found = []
    for kind, text in re.findall(r"^```(\w*)\n(.*?)^```", read(page), re.M | re.S):
        commands = commands_of(text) if kind in ("sh", "text") else []
        if commands:
            before = len(found)
            found += [[command, ""] for command in commands]
            prints = [pair for pair in found[before:] if "train.py" in pair[0]] or found[-1:]
            expected = prints[-1]
        elif kind == "text" and found and not expected[1]:
            expected[1] = text
    return found


# ---------- how each is run ---------------------------------------------------


@dataclass
class Run:
    """Run it, with `more` flags at its end. exact: with versions of PyTorch that begin so it must
    print the page's numbers too, else the page's words. shows: of the page's output only lines
    that begin so. On several ranks it must have the losses of the same command in one process
    with the flags `like`. ranks: then run it on so many too."""
    more: list = ()
    exact: str = "no"
    shows: str = ""
    like: dict = None
    tolerance: float = 1e-5
    ranks: int = 0


@dataclass
class Not:
    """Why it is not run here; or in which test it is run."""
    why: str


INSTALL = Not("the environment: .ci/run does it, from README.md")
NETWORK = Not("it loads from the hub")
SLURM = Not("it needs Slurm; test_faults.py restarts two nodes as the script does")
COPIES = Not("its names stand for others; test_checkpoint.py goes on from a copied milestone")
NANOGPT = Not("nanoGPT's own, which is not here")
SCRIPT = Not("of scripts below it, which need accelerate or nanoGPT; test_readme.py has bare.py")
SIZE = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, batch_size=1, compile=False)
SMALL = dict(SIZE, dtype="float32", device="cpu", eval_iters=1)
ONE = dict(strategy="single", shard_group_size=0, cpu_offload=0.0, prefetch_blocks=0,
           wrap_min_params=0, grad_sync="auto", reduce_dtype="float32", checkpoint="full")


def trains(max_iters=3, ranks=0, tolerance=1e-5, shows="", **keys):
    more = {**SMALL, "max_iters": max_iters, "eval_interval": max_iters, "log_interval": 1, **keys}
    like = {**ONE, "init_from": "scratch", **more}
    return Run(flags(**more), like=like, ranks=ranks, tolerance=tolerance, shows=shows)


def bench(**keys):
    return Run(["--steps=1", *flags(**SIZE, device="cpu", dtype="float32", **keys)])


SAMPLE = Run(["--max_new_tokens=5", "--num_samples=1", "--device=cpu"])
TUNE = dict(max_iters=2, eval_interval=2, eval_iters=9, block_size=32, batch_size=2, device="cpu",
            gradient_accumulation_steps=2, compile=False, dtype="float32", log_interval=1)
TUNES = Run(flags(**TUNE), ranks=2, like={**ONE, **TUNE})

# {page: [(how a command begins, what to do with it)]}, in the page's order
ROWS = {
    "README.md": [
        ("python3 -m venv .venv", INSTALL),
        (". .venv/bin/activate", INSTALL),
        ("pip install -r requirements.txt", INSTALL),
        ("torchrun --standalone --nproc_per_node=2 minimal.py", Run(exact="2.15")),
        ("python data/python_stdlib/prepare.py", Run()),
        ("torchrun --standalone --nproc_per_node=2 train.py config/quickstart.py",
         trains(2, shows="step")),
        ("python sample.py --out_dir=out-quickstart", SAMPLE),
        ("python -m extras.plan config/llama2_7b.py --world_size=8", Run(exact="2")),
        ("python train.py config/quickstart.py --optimizer=muon", trains(ranks=2)),
        ("python train.py config/quickstart.py --dtype=float32", trains()),
        ("torchrun --standalone --nproc_per_node=2 train.py config/quickstart.py --strategy=ddp",
         trains()),
        ("torchrun --standalone --nproc_per_node=2 train.py config/quickstart.py "
         "--strategy=full_shard", trains()),
        ("python -m extras.plan config/quickstart.py --world_size=2", Run(["--n_layer=2"])),
        ("python -m extras.plan config/llama2_7b.py --strategy=full_shard", Run(["--n_layer=2"])),
        ("python train.py config/quickstart.py --init_from=resume", trains(4)),
        ("torchrun --standalone --nproc_per_node=2 train.py config/quickstart.py --init_from=auto",
         trains(6)),
        ("python checkpoint.py full out-quickstart", Run()),
        ("python data/openwebtext/prepare.py --limit=10000", NETWORK),
        ("python data/shakespeare_char/prepare.py", NETWORK),
        ("python data/prepare.py my_data notes/*.txt", Run()),
        ("python train.py config/quickstart.py --dataset=my_data", trains()),
        ("python data/prepare.py my_chats chats.jsonl --chat", Run()),
        ("python train.py config/finetune_smollm2.py --dataset=my_chats", TUNES),
        ("python -m extras.huggingface out-smollm2 DIR", Run()),
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
        ("export TORCH_DISABLE", Not("for the next line")),
        ("torchrun --nnodes=2", Not("two nodes: test_fault_a_dead_node_comes_back")),
        ("export TORCH_DISABLE", SLURM),
        ("export PYTORCH_ALLOC", SLURM),
        ("head=$(scontrol", SLURM),
        ("srun --kill-on-bad-exit", SLURM),
        ("for i in 1 2 3", SLURM),
        ("export TORCH_ELASTIC", SLURM),
        ("export PYTORCH_ALLOC", SLURM),
        ("srun torchrun", SLURM),
    ],
    "docs/data.md": [
        ("python train.py config/quickstart.py --dataset=fineweb_edu:7", trains(ranks=2)),
    ],
    "docs/finetuning.md": [
        ("python data/prepare.py my_chats chats.jsonl --chat", Run()),
        ("python train.py config/finetune_smollm2.py --dataset=my_chats", TUNES),
        ("python sample.py --out_dir=out-smollm2", SAMPLE),
        ("python -m extras.huggingface out-smollm2 my_model", Run()),
        ("torchrun --standalone --nproc_per_node=2 train.py config/finetune_smollm2.py", TUNES),
        ("python data/prepare.py my_answers qa.jsonl", Run()),
        ("python train.py config/finetune_smollm2.py --dataset=my_chats --eval_only",
         Run(flags(**TUNE))),
        ("lm_eval --model hf", Run() if shutil.which("lm_eval") else Not("there is no lm_eval")),
    ],
    "docs/fsdp.md": [
        # two lines are others with 2.13: test_plan_prints_the_events_of_the_docs says why
        ("python -m extras.plan config/quickstart.py", Run(exact="2.15")),
        ("torchrun --standalone --nproc_per_node=2", trains()),
        ("torchrun --standalone --nproc_per_node=2", trains()),
        ("torchrun --standalone --nproc_per_node=2", trains()),
        ("torchrun --standalone --nproc_per_node=2", trains(tolerance=1e-3)),
    ],
    "docs/gpu.md": [
        ("python -m pytest -q -rs -k cuda", Not("it needs a GPU; simulated, the suite runs them")),
        ("mkdir random", Run()),
        ("python -c", Run()),
        ("python -m extras.bench config/train_gpt2.py", bench(dataset="random")),
        ("git clone", NANOGPT),
        ("(cd nanoGPT", NANOGPT),
        ("python bench.py", NANOGPT),
        ("torchrun --standalone --nproc_per_node=1 -m extras.bench", bench(dataset="random")),
        ("python -m extras.bench config/train_gpt2_xl.py --strategy=single",
         bench(dataset="random")),
        ("python -m extras.plan config/train_gpt2_xl.py", Run(["--n_layer=2"])),
        ("python -m extras.plan config/gpt3_13b.py", Run(["--n_layer=2"])),
        ("torchrun --standalone --nproc_per_node=1 -m extras.bench config/gpt3_13b.py",
         bench(dataset="random")),
        ("python -m extras.bench config/train_gpt2_xl.py --strategy=single",
         Not("float8 needs torchao: tests/test_float8.py")),
    ],
    "docs/measurements.md": [
        ("torchrun --standalone --nproc_per_node=2 -m extras.bench config/quickstart.py",
         bench(gradient_accumulation_steps=2)),
        ("python train.py $NANO", NANOGPT),
        ("python train.py config/quickstart.py", trains()),
        ("python trainer.py", SCRIPT),
        ("torchrun --standalone --nproc_per_node=2 bare.py", SCRIPT),
        ("python train.py $NANO", NANOGPT),
        ("python train.py config/train_shakespeare_char.py", trains(dataset="python_stdlib")),
        ("python sample.py --out_dir=OUT", SCRIPT),
        ("python -m extras.huggingface OUT DIR", SCRIPT),
        ("python generate.py DIR", SCRIPT),
        ("python prepare.py", NANOGPT),
        ("python data/prepare.py OUT corpus.jsonl", Not("test_data.py; its tokenizer is GPT-2's")),
    ],
    "docs/model_file.md": [
        ("python -m pytest -q tests/test_contract.py --model=NAME",
         Not("test_contract_itself.py, with a copy of model.py")),
        ("python -m pytest -q tests/test_contract.py --model=NAME --ranks",
         Not("test_contract.py, with extras/")),
    ],
    "docs/simgpu.md": [
        ("SIM_GPUS=2 python -m pytest -q tests/test_cuda.py", Run(["-k", "pause"])),
        ("python -m pytest -q tests/test_simgpu.py", Not("the suite does")),
        ("python -m pytest -q tests/test_simgpu_itself.py", Not("the suite does")),
    ],
    "docs/troubleshooting.md": [
        ("python -m extras.bench config/quickstart.py --steps=3 --profile", bench()),
    ],
    "docs/week.md": [
        ("python data/fineweb_edu/prepare.py", NETWORK),
        ("python -m extras.plan config/llama_1b.py", Run(["--n_layer=2"])),
        ("torchrun --standalone --nproc_per_node=8", Not("8 GPUs; test_readme.py has its config")),
        ("python -m extras.huggingface out-llama-1b", Not("of the run above")),
        ("pip install lm-eval", NETWORK),
        ("lm_eval --model hf", NETWORK),
        ("python sample.py --out_dir=out-llama-1b", Not("of the run above")),
    ],
}


def test_commands_are_all_in_the_table():
    """A command that is in no row, and a row whose command is gone, are named."""
    assert list(ROWS) == [page for page in PAGES if shown(page)]
    for page, rows in ROWS.items():
        commands = [command for command, _ in shown(page)]
        for command, (start, _) in zip([*commands, "nothing"], rows):
            assert command.startswith(start), f"{page}: {command}\nis not in its row: {start}"
        assert commands[len(rows):] == [], f"{page}: in no row"


def test_commands_what_is_run_elsewhere_is_there():
    for page, rows in ROWS.items():
        for _, row in rows:
            for name in re.findall(r"\btest_\w+(?:\.py)?", getattr(row, "why", "")):
                path = f"tests/{name}" if name.endswith(".py") else "tests/test_faults.py"
                assert os.path.exists(os.path.join(HERE, path)), (page, name)
                assert name.endswith(".py") or f"def {name}(" in read(path), (page, name)


# ---------- the clone ---------------------------------------------------------


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone of the repository, and the files that its pages speak of."""
    from test_chat import CHATML, SUN, YES, make
    from test_data import write_jsonl
    from test_huggingface import make_hf

    here = copied(tmp_path_factory.mktemp("a reader") / "a clone")
    (here / "notes").mkdir()
    for i in range(2):
        (here / "notes" / f"{i}.txt").write_text(read("model.py"))
    # What the hub would have, as directories of the same names.
    instruct = here / "HuggingFaceTB/SmolLM2-135M-Instruct"
    base = here / "HuggingFaceTB/SmolLM2-135M"
    instruct.parent.mkdir()
    hf = make(instruct, CHATML)
    make_hf(base, "smollm2", vocab_size=hf.get_vocab_size(), eos_token_id=1, bos_token_id=0)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(instruct / file, base)
    chats = [{"messages": [{**SUN, "content": f"{i}?"}, YES] * (1 + i % 3)} for i in range(99)]
    write_jsonl(here / "chats.jsonl", chats)
    write_jsonl(here / "qa.jsonl", [{"question": f"{i}?", "answer": str(i)} for i in range(99)])
    for name in ("my_code", "my_math"):
        make_data(str(here / "data" / name))
    for split in ("train", "val"):  # a directory that has its prepare.py already
        shutil.copy(here / f"data/my_code/{split}.bin", here / "data/fineweb_edu")
    for name in ("my_code", "my_math"):
        os.remove(here / "data" / name / "meta.json")  # so that their vocabulary is the config's
    (here / "tasks").mkdir()
    yaml = re.search(r"^```yaml\n(.*?)^```", read("docs/finetuning.md"), re.M | re.S)[1]
    (here / "tasks/capitals.yaml").write_text(yaml)
    write_jsonl(here / "tasks/capitals.jsonl", [{"country": "France", "capital": "Paris"}])
    typed(here, "python data/python_stdlib/prepare.py")
    return here


def typed(here, line, cwd=None):
    """What a shell prints to it, in the clone."""
    kinder = ("PYTHONPATH", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "RANK", "WORLD_SIZE")
    env = {key: value for key, value in os.environ.items() if key not in kinder}
    env["PATH"] = os.path.dirname(sys.executable) + ":" + env["PATH"]
    p = subprocess.Popen(
        ["bash", "-c", line], cwd=cwd or here, env=env, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        out, err = p.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(p.pid, 9)
        out, err = p.communicate()
        pytest.fail(f"{line}\nhung\n{out}\n{err}")
    assert p.returncode == 0, f"{line}\n{out}\n{err}"
    return out


# ---------- what it must print ------------------------------------------------


def words_of(line, exact):
    words = line.split()
    return words if exact else [re.sub(r"[\d,.]*\d", "N", word) for word in words]


def prints(out, expected, exact=True, begins=""):
    """Each line of the page is there, in order, maybe with columns that the page leaves out."""
    left = iter(out.splitlines())
    for line in expected.splitlines():
        words = words_of(line, exact)
        if not words or line == "..." or not line.startswith(begins):
            continue
        for printed in left:
            told = iter(words_of(printed, exact))
            if all(word in told for word in words):
                break
        else:
            pytest.fail(f"the page shows: {line}\nbut it prints:\n{out}")


@pytest.mark.parametrize("page", ROWS)
def test_commands_run_as_they_stand_on_the_page(clone, page):
    for (command, expected), (_, row) in zip(shown(page), ROWS[page]):
        if isinstance(row, Not) or "SIM_GPUS" in command and cannot_simulate():
            continue
        line = " ".join([command, *map(shlex.quote, row.more)])
        out = typed(clone, line)
        if not torch.cuda.is_available():  # the pages show a CPU's
            prints(out, expected, torch.__version__.startswith(row.exact), row.shows)
        if row.like and "torchrun" in command:
            same_losses(clone, line, row)
        elif row.ranks:
            launcher = f"torchrun --standalone --nproc_per_node={row.ranks} train.py"
            on_ranks = line.replace("python train.py", launcher)
            typed(clone, f"{on_ranks} --strategy=full_shard --out_dir=out-ranks")
            same_losses(clone, f"{on_ranks} --out_dir=out-ranks", row)


def test_commands_of_finetuning_end_in_a_model_that_transformers_loads(clone):
    """After those of docs/finetuning.md."""
    (clone / "page.py").write_text(
        re.search(r"^```python\n(.*?)^```", read("docs/finetuning.md"), re.M | re.S)[1])
    assert "Hi" in typed(clone, "python page.py")
    files = set(os.listdir(clone / "my_model"))
    assert files >= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    config = json.loads((clone / "my_model/config.json").read_text())
    assert config["eos_token_id"] == [5, 1]
    assert (clone / "data/my_chats/train.mask").exists()


def same_losses(here, line, row):
    """Those that the command has left, and those of one process."""
    argv = shlex.split(line.partition("train.py ")[2])
    out_dir = load_config([os.path.join(HERE, arg) if arg.endswith(".py") else arg
                           for arg in argv]).out_dir
    p = Ranks(1, train_in, str(here), [*argv, *flags(**row.like, out_dir="out-one")]).finish()
    assert p.returncode == 0, p.stdout + p.stderr
    got, expected = losses(here / out_dir), losses(here / "out-one")
    assert len(got) == len(expected) > 1, line
    assert got == pytest.approx(expected, abs=row.tolerance), line


def train_in(here, argv):
    """train.py, of the clone, in a rank that has imported everything."""
    os.chdir(here)
    loader.HERE = Path(here, "data")
    train.main(argv)


def test_commands_that_print_something_else_are_seen():
    out = "GiB  peak  fits\nsingle  1.50  2.50  no\nddp  1.50  3.00  yes\n"
    prints(out, "GiB fits\n...\nsingle 1.50 no\nddp 3.00 yes\n")
    prints(out, "single 9.99 no\n", exact=False)
    for wrong in ("single 1.51 no", "ddp no", "ddp 3.00 yes\nsingle 1.50 no", "full_shard"):
        with pytest.raises(pytest.fail.Exception):
            prints(out, wrong)


def test_commands_work_from_another_directory(clone, tmp_path):
    small = " ".join(flags(**{**SMALL, "max_iters": 1, "out_dir": tmp_path / "out"}))
    here = shlex.quote(str(clone))
    for line in (
        f"python {here}/data/prepare.py words {here}/notes/0.txt --tokenizer=bytes --out=words",
        f"python {here}/train.py {here}/config/quickstart.py --dataset=words {small}",
        f"python {here}/sample.py --out_dir=out --max_new_tokens=3 --num_samples=1 --device=cpu",
        f"python {here}/checkpoint.py full out",
        f"python {here}/extras/plan.py {here}/config/quickstart.py --n_layer=1 --world_size=2",
        f"python {here}/extras/huggingface.py out exported",
    ):
        typed(clone, line, cwd=tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["exported", "out", "out.lock", "words"]
