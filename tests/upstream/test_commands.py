"""
Every `sh` block of README.md, docs/ and extras/docs/, as a reader types it: taken from the page, in
the page's order, by a shell in one clone whose path has a space, with the real launcher, and
without PYTHONPATH or OMP_NUM_THREADS. ADDED has flags that make a command small, at its end; what
has no row there, and none in NOT_RUN, runs as it is. What a page shows right under the block must
be in its output: the same words, and the same numbers where nothing was added.

    python -m pytest -q tests/upstream/test_commands.py
"""

import os
import re
import shutil
import sys
from pathlib import Path

import harness
import pytest
import torch

HERE = Path(harness.HERE)
TUNING = HERE / "extras/docs/finetuning.md"
NOT_RUN = {  # a part of commands: why
    "-m venv": ".ci/run does", "-m pytest": "a test", "data/openwebtext": "it needs the hub"}
SIZE = ("--n_layer=2 --n_head=2 --n_embd=16 --block_size=16 --batch_size=1 --compile=False "
        "--device=cpu --dtype=float32")
STEPS = SIZE + " --eval_iters=1 --log_interval=1 --max_iters={0} --eval_interval={0}"
ADDED = {  # a part of commands: flags; the first that fits
    "own_model.py": "--steps=10",
    "sample.py": "--max_new_tokens=5 --num_samples=1 --device=cpu",
    "--tokens=1e9": "", "extras.plan": "--n_layer=2",
    "extras.bench": f"--steps=1 --gradient_accumulation_steps=2 {SIZE}",
    "finetune_smollm2.py": (
        "--max_iters=2 --eval_interval=2 --eval_iters=9 --block_size=32 --batch_size=2 "
        "--gradient_accumulation_steps=2 --compile=False --device=cpu --dtype=float32"),
    "=resume": STEPS.format(4), "=auto": STEPS.format(6),
    "shakespeare_char.py": f"{STEPS.format(3)} --dataset=python_stdlib",
    "train.py": STEPS.format(3)}

# A block, and what is shown right under it.
BLOCK = re.compile(r"^```sh\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.M | re.S)
PAGES = [HERE / "README.md", *sorted(HERE.glob("docs/*.md"))]
PAGES += sorted(HERE.glob("extras/docs/*.md"))
BLOCKS = [(page, *found) for page in PAGES for found in BLOCK.findall(page.read_text())]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    here = harness.copied(tmp_path_factory.mktemp("a reader") / "a clone")
    (here / "notes").mkdir()
    for i in range(2):
        shutil.copy(here / "model.py", here / f"notes/{i}.txt")
    typed(here, "python data/python_stdlib/prepare.py")
    return here


@pytest.fixture(scope="module")
def from_hub(clone):
    """What finetuning.md begins with: a model and its tokenizer as the hub would have them."""
    from test_hf_tokenizer import make
    from test_huggingface import make_hf
    from test_learn import CHATML, chats
    from test_prepare import write_jsonl

    instruct = clone / "HuggingFaceTB/SmolLM2-135M-Instruct"
    base = clone / "HuggingFaceTB/SmolLM2-135M"
    instruct.parent.mkdir()
    size = make(instruct, CHATML).get_vocab_size()
    make_hf(base, "smollm2", vocab_size=size, eos_token_id=1, bos_token_id=0)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(instruct / file, base)
    write_jsonl(clone / "chats.jsonl", [{"messages": chats(i)} for i in range(99)])
    (clone / "chats.py").write_text(program("import json, functools"))


def program(start):
    """The pages' Python block that begins so."""
    text = "".join(page.read_text() for page in PAGES)
    return re.search(rf"^```python\n({start}.*?)^```", text, re.M | re.S)[1]


def typed(clone, line):
    """What a shell in the clone prints to it."""
    kinder = ("PYTHONPATH", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "PYTHONFAULTHANDLER")
    without = [word for key in kinder for word in ("-u", key)]
    path = os.path.dirname(sys.executable) + ":" + os.environ["PATH"]
    command = ("env", *without, f"PATH={path}", "bash", "-c", line)
    p = harness.shell(*command, cwd=clone, timeout=300)
    assert p.returncode == 0, f"{line}\n{p.stdout}\n{p.stderr}"
    return p.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "page, block, shown", BLOCKS, ids=[f"{page.name} {i}" for i, (page, *_) in enumerate(BLOCKS)])
def test_commands_run_as_they_stand_on_the_page(clone, request, page, block, shown):
    if page == TUNING:
        request.getfixturevalue("from_hub")
    out = ""
    exact = not torch.__version__.startswith("2.9.")  # whose plans differ by 0.2%
    for command in re.sub(r"\\\n\s*", "", block).splitlines():
        if not any(part in command for part in NOT_RUN):
            added = next((flags for part, flags in ADDED.items() if part in command), "")
            exact = exact and not added
            out += typed(clone, f"{command} {added}")
    left = iter(out.splitlines())
    if torch.cuda.is_available():  # the page shows a CPU's
        return
    for line in shown.replace("...\n", "").splitlines():
        assert any(has(printed, line, exact) for printed in left), f"no {line!r} in\n{out}"


def has(printed, line, exact):
    """Its words in their order, maybe with columns that the page leaves out."""
    if not exact:
        printed, line = (re.sub(r"[\d,.]*\d", "N", text) for text in (printed, line))
    words = iter(printed.split())
    return all(word in words for word in line.split())


@pytest.mark.slow
def test_commands_of_finetuning_end_in_a_model_that_transformers_loads(clone):
    (clone / "page.py").write_text(program("from transformers"))
    assert "Hi" in typed(clone, "python page.py")
    assert '"eos_token_id": [\n    5,\n    1' in (clone / "my_model/config.json").read_text()
