"""
What tests of the pages' commands share: a command is taken from its page, typed in a clone by a
shell, and its output compared with the page's. tests/upstream/test_commands.py says how.

    RULES = [("minimal.py", Run()), ("train.py", trains()), ("pip install", None)]
    run_page(clone, "README.md", RULES)
"""

import os
import re
import shlex
import sys
from dataclasses import dataclass
from glob import glob

import pytest
import torch
from harness import HERE, copied, flags, shell

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
    that begin so. needs: a path without which it is skipped, since a fork may have deleted it."""
    more: list = ()
    exact: str = "no"
    shows: str = ""
    needs: str = "."


SIZE = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, batch_size=1, compile=False)
SMALL = dict(SIZE, dtype="float32", device="cpu", eval_iters=1)


def trains(max_iters=3, shows="", **keys):
    """Run train.py for so many steps. What several ranks compute is proved in test_fsdp.py."""
    small = dict(SMALL, max_iters=max_iters, eval_interval=max_iters, log_interval=1)
    return Run(flags(**{**small, **keys}), shows=shows)


SAMPLE = Run(["--max_new_tokens=5", "--num_samples=1", "--device=cpu"])


def rule_of(command, rules):
    """Of [(a part of commands, Run or None)] the first that this command has; None: it is not run.
    Fails if there is none."""
    for part, row in rules:
        if part in command:
            return row
    pytest.fail(f"no rule says how to run {command}")


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
    kinder = ("PYTHONPATH", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "PYTHONFAULTHANDLER")
    without = [word for key in kinder for word in ("-u", key)]
    path = os.path.dirname(sys.executable) + ":" + os.environ["PATH"]
    p = shell("env", *without, f"PATH={path}", "bash", "-c", line, cwd=cwd or here, timeout=300)
    assert p.returncode == 0, f"{line}\n{p.stdout}\n{p.stderr}"
    return p.stdout


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


def run_page(clone, page, rules):
    """The page's commands as they stand there, in its order."""
    for command, expected in shown(page):
        row = rule_of(command, rules)
        if row is None or not is_here(row.needs):
            continue
        line = " ".join([command, *map(shlex.quote, row.more)])
        out = typed(clone, line)
        if not torch.cuda.is_available():  # the pages show a CPU's
            prints(out, expected, torch.__version__.startswith(row.exact), row.shows)
