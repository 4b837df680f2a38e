"""
What tests of the pages' commands share: a command is taken from its page, typed in a clone by a
shell, and its output compared with the page's. tests/upstream/test_commands.py says how.

    ROWS = {"README.md": [("python train.py", trains()), ("pip install", INSTALL)]}
    in_the_table(ROWS, pages())     # every command of every page is in its row
    run_page(clone, "README.md", ROWS["README.md"])
"""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import pytest
import torch
from harness import HERE, Ranks, copied, flags, losses

import train
from configurator import load_config
from data import loader

PROGRAMS = ("python", "python3", "torchrun", "pip", "git", "mkdir", "srun", "sbatch", "lm_eval",
            "export", "for", "cp", "rm", "cd", ".", "vllm", "hf")


# ---------- what the pages say ------------------------------------------------


def read(path):
    with open(os.path.join(HERE, path), encoding="utf-8") as f:
        return f.read()


def pages(of_extras=False):
    """The paths of the core's pages; or of those about extras/."""
    if not of_extras:
        return ["README.md", *sorted(glob("docs/*.md", root_dir=HERE))]
    return sorted(glob("extras/**/*.md", root_dir=HERE, recursive=True))


def is_here(path):
    """A fork may have deleted extras/, which README names too."""
    return os.path.exists(os.path.join(HERE, path))


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


def anchors(page):
    """What GitHub makes of the headings of a page."""
    text = re.sub(r"^```.*?^```", "", read(page), flags=re.M | re.S)  # a comment is no heading
    titles = re.findall(r"^#+ (.*)", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def require_links(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", read(page)):
        path, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):  # https:, mailto:
            continue
        target = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        if target.startswith("extras") and not is_here("extras"):
            continue
        assert is_here(target), link
        assert not anchor or anchor in anchors(target), link


# ---------- how each is run ---------------------------------------------------


@dataclass
class Run:
    """Run it, with `more` flags at its end. exact: with versions of PyTorch that begin so it must
    print the page's numbers too, else the page's words. shows: of the page's output only lines
    that begin so. On several ranks it must have the losses of the same command in one process
    with the flags `like`. ranks: then run it on that many too. needs: a path without which it is
    skipped, since a fork may have deleted it."""
    more: list = ()
    exact: str = "no"
    shows: str = ""
    like: dict = None
    tolerance: float = 1e-5
    ranks: int = 0
    needs: str = "."


@dataclass
class Not:
    """Why it is not run here; or in which test it is run."""
    why: str


INSTALL = Not("the environment: .ci/run does it, from README.md")
NETWORK = Not("it loads from the hub")
SIZE = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, batch_size=1, compile=False)
SMALL = dict(SIZE, dtype="float32", device="cpu", eval_iters=1)
ONE = dict(strategy="single", shard_group_size=0, cpu_offload=0.0, prefetch_blocks=0,
           wrap_min_params=0, grad_sync="auto", reduce_dtype="float32", checkpoint="full")


def trains(max_iters=3, ranks=0, tolerance=1e-5, shows="", **keys):
    more = {**SMALL, "max_iters": max_iters, "eval_interval": max_iters, "log_interval": 1, **keys}
    like = {**ONE, "init_from": "scratch", **more}
    return Run(flags(**more), like=like, ranks=ranks, tolerance=tolerance, shows=shows)


SAMPLE = Run(["--max_new_tokens=5", "--num_samples=1", "--device=cpu"])


# ---------- the table ---------------------------------------------------------


def in_the_table(rows_of, pages):
    """A command that is in no row, and a row whose command is gone, are named."""
    assert list(rows_of) == [page for page in pages if shown(page)]
    for page, rows in rows_of.items():
        commands = [command for command, _ in shown(page)]
        for command, (start, _) in zip([*commands, "nothing"], rows):
            assert command.startswith(start), f"{page}: {command}\nis not in its row: {start}"
        assert commands[len(rows):] == [], f"{page}: in no row"


# ---------- the clone ---------------------------------------------------------


def make_clone(path):
    """A clone of the repository, and the files that its pages speak of."""
    here = copied(path / "a clone")
    (here / "notes").mkdir()
    for i in range(2):
        (here / "notes" / f"{i}.txt").write_text(read("model.py"))
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


def typed_elsewhere(here, cwd, *lines):
    """From the directory cwd, which is empty: prepare `words` there, train to `out`, and then the
    lines, in which {here} is the clone."""
    small = " ".join(flags(**{**SMALL, "max_iters": 1, "out_dir": cwd / "out"}))
    for line in (
        "python {here}/data/prepare.py words {here}/notes/0.txt --tokenizer=bytes --out=words",
        "python {here}/train.py {here}/config/quickstart.py --dataset=words " + small,
        *lines,
    ):
        typed(here, line.format(here=shlex.quote(str(here))), cwd=cwd)


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


def run_page(clone, page, rows):
    """The page's commands as they stand there, in its order."""
    for (command, expected), (_, row) in zip(shown(page), rows):
        if isinstance(row, Not):
            continue
        if not is_here(row.needs):
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


def same_losses(here, line, row):
    """The command has left the losses of one process."""
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
