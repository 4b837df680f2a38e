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
    NETWORK,
    ONE,
    SAMPLE,
    SCRIPT,
    SIZE,
    Not,
    Run,
    in_the_table,
    make_clone,
    pages,
    read,
    run_elsewhere,
    run_page,
    trains,
    typed,
    typed_elsewhere,
)
from harness import flags, make_data


def bench(**keys):
    return Run(["--steps=1", *flags(**SIZE, device="cpu", dtype="float32", **keys)])


TUNE = dict(max_iters=2, eval_interval=2, eval_iters=9, block_size=32, batch_size=2, device="cpu",
            gradient_accumulation_steps=2, compile=False, dtype="float32", log_interval=1)
REPORT = Not("it needs a GPU; test_gpu_report.py runs it on simulated ones")
TUNES = Run(flags(**TUNE), ranks=2, like={**ONE, **TUNE})

# {page: [(how a command begins, what to do with it)]}, in the page's order
ROWS = {
    "extras/docs/data.md": [
        ("python train.py config/quickstart.py --dataset=fineweb_edu:7", trains(ranks=2)),
        ("python extras/data/alpaca/prepare.py", NETWORK),
        ("python train.py extras/config/finetune_gpt2_alpaca.py", TUNES),
        ("python data/wikitext103/prepare.py", NETWORK),
        ("torchrun --standalone --nproc_per_node=2 train.py extras/config/train_wikitext103.py",
         trains()),
    ],
    "extras/docs/finetuning.md": [
        ("python -m extras.masks my_chats chats.jsonl --chat", Run()),
        ("python train.py extras/config/finetune_smollm2.py --dataset=my_chats", TUNES),
        ("python sample.py --out_dir=out-smollm2", SAMPLE),
        ("python -m extras.huggingface out-smollm2 my_model", Run()),
        ("torchrun --standalone --nproc_per_node=2 train.py extras/config/finetune_smollm2.py",
         TUNES),
        ("python -m extras.masks my_answers qa.jsonl", Run()),
        ("python train.py extras/config/finetune_smollm2.py --dataset=my_chats --eval_only",
         Run(flags(**TUNE))),
        ("lm_eval --model hf", Run() if shutil.which("lm_eval") else Not("there is no lm_eval")),
    ],
    "extras/docs/gpu.md": [
        ("python -m extras.gpu_report", REPORT),
        ("python -m extras.gpu_report --minutes=60", REPORT),
        ("python -m pytest -q -rs -k cuda", Not("what one H100 ran")),
        ("python -m extras.gpu_report --minutes=60", REPORT),
        ("python -m extras.gpu_report --minutes=60", REPORT),
        ("python -m extras.plan extras/config/gpt3_13b.py", Run(["--n_layer=2"])),
        ("torchrun --standalone --nproc_per_node=1 -m extras.bench extras/config/gpt3_13b.py",
         bench(dataset="python_stdlib")),
    ],
    "extras/docs/measurements.md": [
        ("torchrun --standalone --nproc_per_node=2 -m extras.bench config/quickstart.py",
         bench(gradient_accumulation_steps=2)),
        ("python -m extras.bench config/quickstart.py --steps=3 --profile", bench()),
        ("python -m extras.huggingface OUT DIR", SCRIPT),
        ("python generate.py DIR", SCRIPT),
    ],
    "extras/docs/plan.md": [
        ("python -m extras.plan config/train_gpt2_xl.py", Run(["--n_layer=2"])),
        # two lines are others with 2.13: test_plan_prints_the_events_of_the_docs says why
        ("python -m extras.plan config/quickstart.py", Run(exact="2.15")),
        # test_plan_rows_beside_the_guide runs the first whole
        ("python -m extras.plan extras/config/llama2_7b.py", Run(["--n_layer=2"])),
        ("python -m extras.plan extras/config/llama2_70b.py", Run(["--n_layer=2"])),
    ],
    "extras/docs/training.md": [
        ("python train.py config/quickstart.py --optimizer=muon", trains(ranks=2)),
    ],
    "extras/docs/week.md": [
        ("python data/fineweb_edu/prepare.py", NETWORK),
        ("python -m extras.plan extras/config/llama_1b.py", Run(["--n_layer=2"])),
        ("torchrun --standalone --nproc_per_node=8", Not("8 GPUs; test_readme.py has its config")),
        ("python -m extras.huggingface out-llama-1b", Not("of the run above")),
        ("pip install lm-eval", NETWORK),
        ("lm_eval --model hf", NETWORK),
        ("python sample.py --out_dir=out-llama-1b", Not("of the run above")),
    ],
    "extras/simgpu/README.md": [
        ("SIM_GPUS=2 python -m pytest -q tests/test_cuda.py", Run(["-k", "pause"])),
        ("python -m pytest -q extras/simgpu/tests/test_simgpu.py", Not("the suite does")),
        ("python -m pytest -q extras/simgpu/tests/test_simgpu_itself.py", Not("the suite does")),
    ],
}


def test_commands_of_extras_are_all_in_the_table():
    in_the_table(ROWS, pages(of_extras=True))


def test_commands_of_extras_that_are_run_elsewhere_are_there():
    run_elsewhere(ROWS, folder="**")


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone of the repository, and files of released models and chats."""
    from test_chat import CHATML, SUN, YES, make
    from test_data import write_jsonl
    from test_huggingface import make_hf

    here = make_clone(tmp_path_factory.mktemp("a reader"))
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
    make_hf(here / "gpt2", "gpt2")
    for name in ("alpaca", "fineweb_edu", "wikitext103"):  # two have their prepare.py there already
        (here / "data" / name).mkdir(exist_ok=True)
        for split in ("train", "val"):
            shutil.copy(here / f"data/my_code/{split}.bin", here / "data" / name)
    for name in ("my_code", "my_math"):
        os.remove(here / "data" / name / "meta.json")  # so that their vocabulary is the config's
    (here / "tasks").mkdir()
    page = read("extras/docs/finetuning.md")
    yaml = re.search(r"^```yaml\n(.*?)^```", page, re.M | re.S)[1]
    (here / "tasks/capitals.yaml").write_text(yaml)
    write_jsonl(here / "tasks/capitals.jsonl", [{"country": "France", "capital": "Paris"}])
    return here


@pytest.mark.slow
@pytest.mark.parametrize("page", ROWS)
def test_commands_of_extras_run_as_they_stand_on_the_page(clone, page):
    run_page(clone, page, ROWS[page])


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
    assert (clone / "data/my_chats/train.mask").exists()


@pytest.mark.slow
def test_commands_of_extras_work_from_another_directory(clone, tmp_path):
    typed_elsewhere(
        clone, tmp_path,
        "python {here}/extras/plan/__main__.py {here}/config/quickstart.py --n_layer=1 "
        "--world_size=2",
        "python {here}/extras/huggingface.py out exported")
    assert sorted(os.listdir(tmp_path)) == ["exported", "out", "out.lock", "words"]
