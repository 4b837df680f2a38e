"""
Keys, files and flags; what a mistake says; what a config means on these ranks.

    python -m pytest -q tests/test_config.py
"""

import ast
import glob
import math
import os
import re
import shutil
import sys

import pytest
import torch
from harness import HERE, of_ours, script, tiny

import train
from checkpoint import Source
from configurator import (
    Config,
    best_dtype,
    config_class,
    fields,
    load_config,
    resolve,
    with_model,
)
from optimizer import learning_rate_at
from ranks import World


def one_line(function, *args):
    """What the SystemExit of function(*args) says."""
    with pytest.raises(SystemExit) as e:
        function(*args)
    assert isinstance(e.value.code, str)
    assert "\n" not in e.value.code
    return e.value.code


# -----------------------------------------------------------------------------
# files and flags


@pytest.mark.parametrize("argv, message", [
    (["--n_lyaer=2"], "no key n_lyaer .*did you mean n_layer"),
    (["--n_layer=twelve"], "n_layer='twelve' must be a whole number"),
    (["--max_iters=1e400"], "must be a whole number"),
    (["--learning_rate=1e400"], "finite"),
    (["--compile=maybe"], "True or False"),
    (["--compile=1"], "True or False"),
    (["--n_layer=True"], "whole number"),
    (["--n_layer=1.5"], "whole number"),
    (["--learning_rate=-1"], "learning_rate=-1.0 must be a finite number, 0 or more"),
    (["--n_layer"], "^--n_layer: .* or write --key=value"),
    (["--n_layer=0"], "n_layer=0 must be at least 1"),
    (["--n_layer=1e9"], "n_layer=1000000000 must be at most 10000"),
    (["--out_dir="], "--out_dir=: out_dir='' must be a name or a path"),
    (["--dataset="], "--dataset=: dataset='' must be a name or a path"),
    (["--batch_size=0"], "batch_size=0 must be a whole number, at least 1"),
    (["--dropout=1.0"], "dropout=1.0 must be .*below 1"),
    (["--beta1=1.0"], "beta1=1.0 must be .*below 1"),
    (["--cpu_offload=1.5"], "fraction"),
    (["--dtype=fp8"], "one of 'auto', 'float32'"),
    (["--device=tpu"], "device='tpu' must be auto, cpu"),
    (["--n_embd=100", "--n_head=12"], "multiple of n_head=12"),
    (["config/none.py"], "config/none.py"),
])
def test_config_bad_flag_is_one_clear_line(argv, message):
    assert re.search(message, one_line(load_config, argv))


@pytest.mark.parametrize("text, message", [
    ("n_lyaer = 2", "did you mean n_layer"),
    ("n_layer = 'twelve'", "whole number"),
    ("n_layer = (", "SyntaxError"),
    ("compile = 1", "True or False"),
    ("exit()", "SystemExit: None"),
])
def test_config_bad_file_is_one_clear_line(tmp_path, text, message):
    path = tmp_path / "c.py"
    path.write_text(text)
    said = one_line(load_config, [str(path)])
    assert message in said
    assert str(path) in said


def test_config_absurd_depth_of_a_checkpoint_is_refused_before_it_is_built(tmp):
    header = {"config": {}, "model_args": {"n_layer": 10**7}, "iter_num": 0, "best_val_loss": 1.0}
    source = Source("ckpt.pt", header)
    assert "n_layer=10000000 must be at most 10000" in one_line(with_model, tiny(tmp), source)


def test_config_order_and_types(tmp_path):
    path = tmp_path / "c.py"
    path.write_text("import time\n"
                    "from math import sqrt\n"
                    "max_iters = 10\n"
                    "lr_decay_iters = max_iters * 2\n"
                    "learning_rate = 1\n"
                    "wandb_run_name = 'x' + str(time.time())\n")
    cfg = load_config(["--max_iters=1e4", str(path), "--n_layer=3", "--wandb_project=a=b",
                       "--bias=true"])
    got = cfg.max_iters, cfg.lr_decay_iters, cfg.n_layer, cfg.wandb_project, cfg.bias
    assert got == (10, 20, 3, "a=b", True)
    assert type(cfg.learning_rate) is float
    assert load_config([str(path), "--max_iters=1e4"]).max_iters == 10000


def test_config_help_lists_every_key():
    text = script("train.py", "--help").stdout
    for f in fields(config_class("gpt2")):
        default = re.search(rf"^  --{f.name}=(\S+)", text, re.M)
        assert default, f.name
        assert ast.literal_eval(default[1]) == f.default, f.name


def text_of(*patterns, without=()):
    out = ""
    for pattern in patterns:
        for path in glob.glob(os.path.join(HERE, pattern)):
            if os.path.basename(path) not in without:
                out += open(path).read()
    return out


@of_ours
def test_config_every_key_is_read_and_tested():
    """A key that no code reads, or no test sets, is a defect."""
    code = text_of("*.py", "data/*.py", without=("test_fsdp.py", "conftest.py", "configurator.py"))
    tests = text_of("test_fsdp.py", "tests/*.py", "config/*.py")
    ours = {f.name for f in fields(Config)}
    for f in fields(config_class("gpt2")):
        owner = "cfg" if f.name in ours else "config"
        assert re.search(rf"\b{owner}\.{f.name}\b", code), f"nothing reads {f.name}"
        assert re.search(rf"\b{f.name}\b", tests), f"no test or config sets {f.name}"


# -----------------------------------------------------------------------------
# --model: the keys of another model's file

OTHER = """
from dataclasses import dataclass


@dataclass
class ModelConfig:
    block_size: int = 8  # context length in tokens
    vocab_size: int = 67
    n_kv_head: int = 2  # heads of the keys and values


class Model:
    pass
"""


@pytest.fixture
def other(models):
    """--model=other_model"""
    (models / "other_model.py").write_text(OTHER)
    yield "--model=other_model"
    sys.modules.pop("other_model", None)
    config_class.cache_clear()


def test_config_model_brings_its_own_keys(other):
    cfg = load_config(["--batch_size=3", other, "--n_kv_head=4"])
    assert (cfg.model, cfg.batch_size, cfg.n_kv_head) == ("other_model", 3, 4)
    assert not hasattr(cfg, "n_layer")


@pytest.mark.parametrize("argv", [
    ["OTHER", "--n_layer=2"],
    ["--n_layer=2", "OTHER"],
    ["--n_kv_head=4"],  # of other_model, not of gpt2
])
def test_config_key_of_another_model_is_refused(other, argv):
    said = one_line(load_config, [other if arg == "OTHER" else arg for arg in argv])
    assert re.search(r"(n_layer|n_kv_head).*\(model=(gpt2|other_model)\)", said)


@pytest.mark.parametrize("name", ["no_such_model", "json", "metrics", "train", "", "..", "/model",
                                  "tests/moe", "out_x.evil", "evil"])
def test_config_unknown_model_is_one_clear_line(tmp_path, monkeypatch, capsys, name):
    """It is not imported: not from a package, not from what else Python finds."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "out_x").mkdir()
    for file in ("out_x/evil.py", "evil.py"):
        (tmp_path / file).write_text("print('evil runs')")
    for function, argv in ((load_config, [f"--model={name}"]), (train.main, [f"--model={name}"]),
                           (train.main, [f"--model={name}", "--help"])):
        said = one_line(function, argv)
        assert said.startswith(f"model={name!r}: ")
        assert "ModelConfig" in said
    assert capsys.readouterr().out == ""


ODD = '''
from dataclasses import dataclass
from typing import Literal

class Model:
    pass

@dataclass
class ModelConfig:
    """A docstring, with a line of its own.

    width: its width
    """
    # --- model odd
    block_size: int = 8  # context length in tokens

    bias: float = -1.5  # which may
    #   be negative
    kind: Literal["a", "b"] = "a"

    def __post_init__(self):
        pass
'''


@pytest.fixture
def odd(models):
    """odd(before, after): --model=odd, with another text in its file."""
    def make(before="", after=""):
        assert before in ODD
        (models / "odd.py").write_text(ODD.replace(before, after))
        return "--model=odd"
    yield make
    sys.modules.pop("odd", None)
    config_class.cache_clear()


@pytest.mark.parametrize("before, after, message", [
    ("block_size: int = 8", "momentum: float = 0.5", "momentum, .*: every run has a key momentum"),
    ("block_size: int = 8", "dtype: str = 'x'", "needs another name: every run has a key dtype"),
    ("\nfrom dataclasses", "from __future__ import annotations\nfrom dataclasses",
     "ModelConfig.block_size, a 'int', must be an int, .* without from __future__ import annot"),
    ("int = 8", "int | None = 8", r"ModelConfig.block_size, a int \| None, must be an int, float"),
    ("int = 8", "tuple = (8,)", "ModelConfig.block_size, a <class 'tuple'>, must be an int"),
    ("int = 8", "int", "ModelConfig.block_size, .* or Literal, with a default"),
    ("@dataclass\n", "", "NAME is NAME.py beside it, with a Model and a dataclass ModelConfig")])
def test_config_a_model_files_odd_key_is_one_clear_line(odd, before, after, message):
    said = one_line(load_config, [odd(before, after)])
    assert re.search("model='odd': .*" + message, said), said


def test_config_a_model_files_own_keys(odd, capsys):
    model = odd()
    cfg = load_config([model, "--bias=-2", "--kind=b"])
    assert (cfg.bias, cfg.kind) == (-2.0, "b")
    assert "must be a finite number" in one_line(load_config, [model, "--bias=1e400"])
    assert "one of 'a', 'b'" in one_line(load_config, [model, "--kind=c"])
    said = one_line(load_config, ["--kind=b", model])
    assert said == "--kind=b: no key kind (model=gpt2); --help lists the keys (--model comes first)"
    train.main([model, "--help"])
    text = capsys.readouterr().out
    keys = (r"^model odd\n  --block_size=8\n +context length in tokens\n"
            r"  --bias=-1.5\n +which may\n +be negative\n  --kind=")
    assert re.search(keys, text, re.M)
    assert "docstring" not in text and "width" not in text and "post_init" not in text


def test_config_a_model_files_literals_may_be_numbers(odd):
    model = odd('Literal["a", "b"] = "a"', "Literal[1, 2] = 1")
    assert load_config([model, "--kind=2"]).kind == 2
    assert "kind=3 must be one of 1, 2" in one_line(load_config, [model, "--kind=3"])


def test_config_help_lists_the_keys_of_model(other, capsys):
    train.main([other, "--help"])
    text = capsys.readouterr().out
    assert re.search(r"^  --n_kv_head=2\n +heads of the keys and values$", text, re.M)
    assert re.search(r"^  --batch_size=12$", text, re.M)
    assert "--n_layer" not in text


# -----------------------------------------------------------------------------
# what a config means on these ranks

ONE = World()
TWO = World(size=2, local_size=2)
FOUR = World(size=4, local_size=4)
FULL = dict(strategy="full_shard")


def test_config_nanogpts_backend_goes_on_any_machine(tmp):
    """nccl is nanoGPT's default, so its configs have it; one process opens no group."""
    assert resolve(tiny(tmp, backend="nccl"), ONE).strategy == "single"


@pytest.mark.parametrize("world, overrides, message", [
    (ONE, FULL, "torchrun --standalone --nproc_per_node=2"),
    (TWO, dict(strategy="single"), "strategy"),
    (TWO, dict(gradient_accumulation_steps=3), "use a multiple of 2"),
    (TWO, dict(strategy="ddp", cpu_offload=0.5), "cpu_offload"),
    (TWO, dict(strategy="ddp", wrap_min_params=10), "wrap_min_params"),
    (TWO, dict(strategy="ddp", prefetch_blocks=1), "prefetch_blocks"),
    (TWO, dict(**FULL, shard_group_size=2), "shard_group_size"),
    (FOUR, dict(strategy="hybrid_shard", shard_group_size=3), "groups of 3"),
    (TWO, dict(**FULL, activation_offload=True, activation_checkpointing="full", compile=True),
     "--compile=False"),
    (TWO, dict(**FULL, activation_offload=True), "use --activation_checkpointing=full"),
    (ONE, dict(activation_offload=True, activation_checkpointing="selective"),
     "use --activation_checkpointing=full"),
    (TWO, dict(**FULL, backend="nccl"), "NCCL"),
    (ONE, dict(strategy="single", reduce_dtype="bfloat16"), "reduce_dtype"),
    (TWO, dict(**FULL, cpu_offload=0.5, dtype="float16"), "use --dtype=bfloat16 or float32"),
    (TWO, dict(**FULL, wrap_min_params=9, activation_checkpointing="selective"),
     "wrap_min_params=0, or full checkpointing"),
    (TWO, dict(**FULL, wrap_min_params=9, compile=True, loss_chunks=2), "--wrap_min_params=0"),
    (TWO, dict(**FULL, wrap_min_params=9, activation_checkpointing="full", prefetch_blocks=1),
     "--prefetch_blocks=0"),
    (ONE, dict(strategy="single", grad_sync="last"), "grad_sync"),
])
def test_config_combination_without_meaning_is_one_clear_line(tmp, world, overrides, message):
    said = one_line(resolve, tiny(tmp, **overrides), world, world.size > 1)
    assert re.search(message, said)
    assert said.partition("=")[0] in overrides


@pytest.mark.parametrize("world, overrides, expected", [
    (ONE, {}, dict(strategy="single", grad_sync="every", shard_group_size=0)),
    (TWO, {}, dict(strategy="full_shard", grad_sync="every", shard_group_size=0)),
    (TWO, dict(strategy="ddp"), dict(strategy="ddp", grad_sync="last")),
    (World(size=8, local_size=4), dict(strategy="hybrid_shard", gradient_accumulation_steps=8),
     dict(grad_sync="every", shard_group_size=4)),
    (TWO, dict(grad_sync="last"), dict(grad_sync="last")),
])
def test_config_resolve_spells_out_the_defaults(tmp, world, overrides, expected):
    cfg = resolve(tiny(tmp, **overrides), world, world.size > 1)
    assert {key: getattr(cfg, key) for key in expected} == expected
    assert resolve(tiny(tmp), ONE, True).strategy == "full_shard"  # torchrun of one process


@pytest.mark.parametrize("fast, dtype", [(True, "bfloat16"), (False, "float32")])
def test_config_auto_dtype_of_a_cpu_is_what_it_is_fast_at(tmp, monkeypatch, fast, dtype):
    for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, probe, lambda: fast)
    assert resolve(tiny(tmp, dtype="auto"), ONE).dtype == dtype


@pytest.mark.parametrize("capability, dtype", [((9, 0), "bfloat16"), ((8, 0), "bfloat16"),
                                               ((7, 5), "float16")])
def test_config_auto_dtype_of_a_gpu(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert best_dtype(torch.device("cuda")) == dtype


def test_config_compile_on_a_cpu_asks_for_a_compiler(tmp, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "install g++" in one_line(resolve, tiny(tmp, compile=True), ONE)


def test_config_of_a_checkpoint_has_its_sizes_and_this_runs_dropout(tmp):
    header = dict(config={}, model_args=dict(n_layer=2, dropout=0.0), iter_num=0, best_val_loss=1.0)
    cfg = with_model(tiny(tmp, dropout=0.3), Source("ckpt.pt", header))
    assert (cfg.n_layer, cfg.dropout) == (2, 0.3)


def test_config_schedule_of_the_learning_rate(tmp):
    """Warm-up over 2 steps, cosine to step 20, then min_lr."""
    cfg = tiny(tmp, learning_rate=1e-3, min_lr=1e-4, warmup_iters=2, lr_decay_iters=20)
    expected = {
        0: 1e-3 / 3,  # the first step learns too
        1: 2e-3 / 3,
        2: 1e-3,
        5: 1e-4 + 9e-4 * (2 + math.sqrt(3)) / 4,  # cos(pi / 6)
        11: 5.5e-4,  # half-way
        14: 1e-4 + 9e-4 / 4,  # cos(2 pi / 3)
        20: 1e-4,
        1000: 1e-4,
    }
    assert {step: learning_rate_at(step, cfg) for step in expected} == pytest.approx(expected)
    constant = tiny(tmp, learning_rate=1e-3, decay_lr=False)
    assert [learning_rate_at(step, constant) for step in (0, 11, 1000)] == [1e-3] * 3
