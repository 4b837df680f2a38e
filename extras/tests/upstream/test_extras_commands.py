"""
Every command of the pages in extras/, as test_commands.py runs those of the other pages.

    python -m pytest -q extras/tests/upstream/test_extras_commands.py
"""

import json
import os
import re
import shutil

import pytest
from commands import (
    SAMPLE,
    Run,
    make_clone,
    pages,
    read,
    rule_of,
    run_page,
    shown,
    trains,
    typed,
)
from harness import flags

TUNE = dict(max_iters=2, eval_interval=2, eval_iters=9, block_size=32, batch_size=2, device="cpu",
            gradient_accumulation_steps=2, compile=False, dtype="float32", log_interval=1)

RULES = [  # (a part of commands, what to do with them); the first that fits
    ("chats.py", Run()),
    ("extras.masks", Run()),
    ("finetune_smollm2.py", Run(flags(**TUNE))),
    ("sample.py", SAMPLE),
    ("extras.huggingface", Run()),
    ("extras.plan config/quickstart.py", Run(exact="2.15")),
    ("extras.plan", Run(["--n_layer=2"])),
    ("--optimizer=muon", trains()),
]


def test_commands_of_extras_have_a_rule():
    for page in pages(of_extras=True):
        for command, _ in shown(page):
            rule_of(command, RULES)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone of the repository, with a model and its tokenizer as the hub would have them."""
    from test_hf_tokenizer import make
    from test_huggingface import make_hf
    from test_learn import CHATML, chats
    from test_prepare import write_jsonl

    here = make_clone(tmp_path_factory.mktemp("a reader"))
    instruct = here / "HuggingFaceTB/SmolLM2-135M-Instruct"
    base = here / "HuggingFaceTB/SmolLM2-135M"
    instruct.parent.mkdir()
    hf = make(instruct, CHATML)
    make_hf(base, "smollm2", vocab_size=hf.get_vocab_size(), eos_token_id=1, bos_token_id=0)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(instruct / file, base)
    write_jsonl(here / "chats.jsonl", [{"messages": chats(i)} for i in range(99)])
    (here / "chats.py").write_text(re.search(  # the page's recipe
        r"^```python\n(import json.*?)^```", read("extras/docs/masks.md"), re.M | re.S)[1])
    return here


@pytest.mark.slow
@pytest.mark.parametrize("page", pages(of_extras=True))
def test_commands_of_extras_run_as_they_stand_on_the_page(clone, page):
    run_page(clone, page, RULES)


@pytest.mark.slow
def test_commands_of_finetuning_end_in_a_model_that_transformers_loads(clone):
    """After those of extras/docs/finetuning.md."""
    page = read("extras/docs/finetuning.md")
    (clone / "page.py").write_text(re.search(r"^```python\n(.*?)^```", page, re.M | re.S)[1])
    assert "Hi" in typed(clone, "python page.py")
    files = set(os.listdir(clone / "my_model"))
    assert files >= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    config = json.loads((clone / "my_model/config.json").read_text())
    assert config["eos_token_id"] == [5, 1]
