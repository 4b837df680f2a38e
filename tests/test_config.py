"""
Keys, files and flags; another model's keys; what a config means. Mistakes: test_mistakes.py.

    python -m pytest -q tests/test_config.py
"""

import ast
import glob
import os
import re
from dataclasses import asdict, fields, replace
from types import SimpleNamespace

import pytest
import torch
from harness import HERE, refused, script, tiny

import start
import train
from configurator import (
    Config,
    as_dict,
    best_dtype,
    differences,
    keys_of,
    load_config,
    resolve,
    with_sizes,
)
from ranks import World

# ---------- files and flags ---------------------------------------------------


def test_config_order_and_types(tmp_path):
    """Left to right; a file may compute with what came before it."""
    path = tmp_path / "c.py"
    path.write_text("import time\ndef helper(): ...\nmax_iters = 10\nlr_decay_iters = max_iters * 2"
                    "\nlearning_rate = 1\nwarmup_iters = n_layer\n"
                    "wandb_run_name = 'x' + str(time.time())\n")
    cfg = load_config(["--max_iters=1e4", "--n_layer=4", str(path), "--n_layer=3",
                       "--wandb_project=a=b", "--bias=true"])
    got = cfg.max_iters, cfg.lr_decay_iters, cfg.warmup_iters, cfg.sizes.n_layer, cfg.wandb_project
    assert got == (10, 20, 4, 3, "a=b") and cfg.sizes.bias is True
    assert type(cfg.learning_rate) is float
    assert load_config([str(path), "--max_iters=1e4"]).max_iters == 10000


def test_config_given_keys_are_those_that_files_and_flags_set(tmp_path):
    """Though they may be the defaults. test_train.py has what a start makes of them."""
    path = tmp_path / "c.py"
    path.write_text("n_layer = 12\n")
    cfg = load_config([str(path), "--dropout=0.3"])
    sizes = dict(n_layer=12, n_embd=96)  # of a checkpoint
    for later in (cfg, replace(cfg, seed=7), with_sizes(cfg, "gpt2", sizes, "ckpt.pt")):
        assert set(later.given) == {"n_layer", "dropout"}


def test_config_odd_sizes_of_a_checkpoint_are_one_line():
    """It is no flag, so a text is no number."""
    line = refused(with_sizes, load_config([]), "gpt2", {"n_layer": "3"}, "--ckpt.pt")
    assert line == "--ckpt.pt: model_args: n_layer='3' must be a whole number"


def test_config_help_lists_every_key():
    text = script("train.py", "--help").stdout
    for f in keys("gpt2"):
        default = re.search(rf"^  --{f.name}=(\S+)", text, re.M)
        assert default, f.name
        assert ast.literal_eval(default[1]) == f.default, f.name
    assert set(re.findall(r"^  --(\w+)=", text, re.M)) == {f.name for f in keys("gpt2")}


def keys(model):
    return [*keys_of(model).values()]


def text_of(*patterns):
    paths = [path for pattern in patterns for path in glob.glob(pattern, root_dir=HERE)]
    paths = [path for path in paths if path != "configurator.py"]  # which has all keys
    return "".join(open(os.path.join(HERE, path)).read() for path in paths)


# The keys with which a run has the same numbers. (Strategies, types and devices round otherwise.)
NO_NUMBERS = set("""
    out_dir init_from checkpoint save_interval keep_checkpoints keep_every always_save_checkpoint
    eval_interval eval_iters eval_only log_interval wandb_log wandb_project wandb_run_name
    tensorboard max_iters device dtype compile backend strategy shard_group_size
    reduce_dtype wrap_min_params cpu_offload activation_checkpointing activation_offload loss_chunks
    prefetch_blocks grad_sync loss_scale reshard_group_size""".split())
NUMBERS = set("""
    dataset gradient_accumulation_steps batch_size seed freeze frozen_dtype momentum learning_rate
    weight_decay beta1 beta2 grad_clip decay_lr warmup_iters lr_schedule lr_decay_iters min_lr
    block_size dropout""".split())


def test_config_a_resumed_run_is_told_of_each_key_that_changes_its_numbers():
    """Each key has its answer on its own line, a fork's too."""
    cfg, told = load_config([]), set()
    for key in as_dict(cfg):
        for line in differences({**as_dict(cfg), key: "other"}, cfg):
            assert line.startswith(f"{key}=") and "(was 'other')" in line
            told.add(key)
    assert NUMBERS <= told and not told & NO_NUMBERS


def test_config_a_checkpoint_of_before_lr_schedule_had_a_cosine(tmp, capsys):
    cfg = tiny(tmp, lr_schedule="linear")
    before = {key: value for key, value in as_dict(cfg).items() if key != "lr_schedule"}
    source = SimpleNamespace(path="out", header=dict(config=before, model_args=asdict(cfg.sizes)))
    start.final_config(cfg, source, True, World())
    assert capsys.readouterr().out.endswith("of out: lr_schedule='linear' (was 'cosine')\n")


def require_read_and_tested(keys, code, tests):
    """Code reads train.py's keys from `cfg`, and a model's own keys from `config`."""
    ours = {f.name for f in fields(Config)}
    for f in keys:
        owner = "cfg" if f.name in ours else r"(config|cfg\.sizes)"
        assert re.search(rf"\b{owner}\.{f.name}\b", code), f"nothing reads {f.name}"
        assert re.search(rf"\b{f.name}\b", tests), f"no test or config sets {f.name}"


# ---------- --model: the keys of another model's file -------------------------

OTHER = '''
from dataclasses import dataclass
from typing import Literal

class Model: ...

@dataclass
class ModelConfig:
    block_size: int = 8  # context length in tokens

    bias: float = -1.5  # which may
    #   be negative
    kind: Literal[1, 2] = 1
'''


@pytest.fixture
def other(models):
    """other(before, after): --model=other, with another text in its file."""
    def make(before="", after=""):
        assert before in OTHER
        (models / "other.py").write_text(OTHER.replace(before, after))
        return "--model=other"
    return make


def test_config_model_brings_its_own_keys(other):
    model = other()
    cfg = load_config(["--batch_size=3", model, "--bias=-2", "--kind=2"])
    assert (cfg.model, cfg.batch_size, cfg.sizes.bias, cfg.sizes.kind) == ("other", 3, -2.0, 2)
    assert not hasattr(cfg.sizes, "n_layer")
    for argv, said in (([model, "--kind=3"], "kind=3 .*1, 2"),
                       ([model, "--n_layer=2"], "n_layer.*model=other"),
                       (["--n_layer=2", model], "n_layer.*model=other"),
                       (["--kind=2", model], "kind.*model=gpt2.*--model comes first")):
        assert re.search(said, refused(load_config, argv))


def test_config_a_key_that_the_checkpoints_model_lacks_is_refused(other, tmp_path):
    """Else a fine-tune would go without the dropout that was asked for."""
    other()
    cfg = load_config(["--dropout=0.5"])
    assert "no key dropout" in refused(with_sizes, cfg, "other", dict(block_size=8), "ckpt.pt")
    path = tmp_path / "c.py"
    path.write_text("model = ['other']\n")
    assert "model=['other'] must be" in refused(load_config, [str(path)])


def test_config_help_of_another_model(other, capsys):
    train.main([other(), "--help"])
    text = capsys.readouterr().out
    keys = (r"^model other\n  --block_size=8\n +context length in tokens\n"
            r"  --bias=-1.5\n +which may\n +be negative\n  --kind=")
    assert re.search(keys, text, re.M)
    assert re.search(r"^  --batch_size=12$", text, re.M) and "--n_layer" not in text


@pytest.mark.parametrize("before, after, key, remedy", [
    ("block_size: int = 8", "momentum: float = 0.5", "momentum", "rename"),
    ("@dataclass\n", "", "model", "dataclass ModelConfig")])
def test_config_model_with_an_odd_key_is_one_line(other, before, after, key, remedy):
    said = refused(load_config, [other(before, after)])
    assert said.startswith("model='other': ") and key in said and remedy in said


@pytest.mark.parametrize("name", ["no_such_model", "json", "metrics", "", "..", "/model", "data",
                                  "tests/hybrid", "data.loader", "evil"])
def test_config_unknown_model_is_not_imported(tmp_path, monkeypatch, capsys, name):
    require_unknown_model(tmp_path, monkeypatch, capsys, name)


def require_unknown_model(tmp_path, monkeypatch, capsys, name):
    """Not from a package, not from what else Python finds."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil.py").write_text("print('evil runs')")
    flag = f"--model={name}"
    for function, argv in ((load_config, [flag]), (train.main, [flag, "--help"])):
        said = refused(function, argv)
        assert said.startswith(f"model={name!r}: ")
        assert f"no {name}.py beside model.py" in said or f"{name}.py lacks" in said
    assert capsys.readouterr().out == ""


# ---------- what a config means on these ranks --------------------------------

ONE, TWO = World(), World(size=2, local_size=2)


@pytest.mark.parametrize("world, overrides, expected", [
    (ONE, {}, dict(strategy="single", grad_sync="every", shard_group_size=0)),
    (ONE, dict(backend="nccl"), dict(strategy="single")),  # nanoGPT's configs have it
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


def test_config_regather_groups_divide_a_copy_and_not_the_world(tmp):
    world = World(size=8, local_size=4)
    keys = dict(strategy="hybrid_shard", gradient_accumulation_steps=8)
    assert resolve(tiny(tmp, reshard_group_size=2, **keys), world, True)
    said = refused(resolve, tiny(tmp, reshard_group_size=8, **keys), world, True)
    assert "use a divisor of 4, from 2 on" in said


def test_config_hybrid_in_groups_of_one_by_default_is_refused(tmp):
    """Processes that somebody started by hand, without LOCAL_WORLD_SIZE; or nodes of one GPU."""
    said = refused(resolve, tiny(tmp, strategy="hybrid_shard"), World(size=2), True)
    assert "nothing would be sharded" in said and "--shard_group_size=2" in said
    for keys in (dict(strategy="hybrid_shard", shard_group_size=1), dict(strategy="full_shard")):
        assert resolve(tiny(tmp, **keys), World(size=2), True)
    assert resolve(tiny(tmp, strategy="hybrid_shard"), World(), True)


def test_config_home_is_where_a_path_says(tmp_path, monkeypatch):
    """A shell leaves the ~ of --out_dir=~/x."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.py").write_text("init_from = '~/other'\nout_dir = '~/mine'\nfreeze = 'a~b'")
    cfg = load_config([str(tmp_path / "c.py"), "--out_dir=~/x"])
    assert cfg.out_dir == f"{tmp_path}/x" and cfg.init_from == f"{tmp_path}/other"
    assert cfg.freeze == "a~b"


def test_config_auto_dtype_is_what_the_device_is_fast_at(tmp, monkeypatch):
    for fast, dtype in ((True, "bfloat16"), (False, "float32")):
        for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
            monkeypatch.setattr(torch.cpu, probe, lambda fast=fast: fast)
        assert resolve(tiny(tmp, dtype="auto"), ONE).dtype == dtype
    for capability, dtype in (((9, 0), "bfloat16"), ((8, 0), "bfloat16"), ((7, 5), "float16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert best_dtype(torch.device("cuda")) == dtype
