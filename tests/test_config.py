"""
Keys, files and flags; another model's keys; what a config means. And what is refused, in all
commands: one line with the key and a remedy, exit code 1, no traceback.

    python -m pytest -q tests/test_config.py
"""

import glob
import os
import re
import shutil
from dataclasses import fields, replace

import pytest
import torch
from harness import HERE, Ranks, refused, script
from training import arguments, tiny

import train
from configurator import Config, best_dtype, keys_of, load_config, model_file, resolve, with_sizes
from ranks import World

os.environ["HF_HUB_OFFLINE"] = "1"  # before its library is imported, which looks once

# ---------- files and flags ---------------------------------------------------


def test_config_order_and_types(tmp_path):
    """Left to right; a file may compute with what came before it."""
    path = tmp_path / "c.py"
    path.write_text("import time\ndef helper(): ...\nmax_iters = 10\nlr_decay_iters = max_iters * 2"
                    "\nlearning_rate = 1\nwarmup_iters = n_layer * 2\n"
                    "wandb_run_name = 'x' + str(time.time())\n")
    cfg = load_config(["--max_iters=1e4", "--n_layer=4", str(path), "--n_layer=3",
                       "--wandb_project=a=b", "--bias=true"])
    got = cfg.max_iters, cfg.lr_decay_iters, cfg.warmup_iters, cfg.sizes.n_layer, cfg.wandb_project
    assert got == (10, 20, 8, 3, "a=b") and cfg.sizes.bias is True
    assert type(cfg.learning_rate) is float
    assert load_config(["--n_layer=4", str(path), "--max_iters=1e4"]).max_iters == 10000


def test_config_given_keys_are_those_that_files_and_flags_set(tmp_path):
    """Though they may be the defaults. test_train.py has what a start makes of them."""
    path = tmp_path / "c.py"
    path.write_text("n_layer = 12\n")
    cfg = load_config([str(path), "--dropout=0.3"])
    sizes = dict(n_layer=12, n_embd=96)  # of a checkpoint
    for later in (cfg, replace(cfg, seed=7), with_sizes(cfg, "gpt2", sizes, "ckpt.pt")):
        assert set(later.given) == {"n_layer", "dropout"}


def keys(model):
    return [*keys_of(model).values()]


def text_of(*patterns):
    paths = [path for pattern in patterns for path in glob.glob(pattern, root_dir=HERE)]
    paths = [path for path in paths if path != "configurator.py"]  # which has all keys
    return "".join(open(os.path.join(HERE, path)).read() for path in paths)


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
    (models / "other.py").write_text(OTHER)
    return "--model=other"


def test_config_model_brings_its_own_keys(other):
    cfg = load_config(["--batch_size=3", other, "--bias=-2", "--kind=2"])
    assert (cfg.model, cfg.batch_size, cfg.sizes.bias, cfg.sizes.kind) == ("other", 3, -2.0, 2)
    assert not hasattr(cfg.sizes, "n_layer")
    for argv, said in (([other, "--kind=3"], "kind=3 .*1, 2"),
                       ([other, "--n_layer=2"], "n_layer.*model=other"),
                       (["--n_layer=2", other], "n_layer.*model=other"),
                       (["--kind=2"], "kind.*model=gpt2")):
        assert re.search(said, refused(load_config, argv))


def test_config_a_checkpoints_model_has_its_own_defaults(other):
    """And not gpt2's, which nobody has asked for."""
    cfg = with_sizes(load_config(["--batch_size=3"]), "other", dict(kind=2), "ckpt.pt")
    assert (cfg.batch_size, cfg.sizes.block_size, cfg.sizes.bias, cfg.sizes.kind) == (3, 8, -1.5, 2)


@pytest.mark.parametrize("flag, model, sizes, said", [
    # else a fine-tune would go without the dropout that was asked for
    ("--dropout=0.5", "other", dict(block_size=8), "no key dropout"),
    ("--n_layer=2", "gpt2", dict(n_layer=3), "pass --n_layer=3"),
    ("--model=other", "gpt2", {}, "pass --model=gpt2"),
    ("--block_size=32", "gpt2", dict(block_size=16), "pass --block_size=16")])
def test_config_what_contradicts_a_checkpoint_is_refused(other, flag, model, sizes, said):
    assert said in refused(with_sizes, load_config([flag]), model, sizes, "ckpt.pt")


def test_config_help_of_another_model(other, capsys):
    train.main([other, "--help"])
    text = capsys.readouterr().out
    assert "    block_size: int = 8  # context length in tokens\n" in text
    assert "    batch_size: int = 12  # " in text and "n_layer" not in text


@pytest.mark.parametrize("name", ["no_such_model", "json", "", "..", "/model", "data",
                                  "tests/nets", "data.loader", "evil"])
def test_config_unknown_model_is_not_imported(tmp_path, monkeypatch, capsys, name):
    """Not from a package, not from what else Python finds."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil.py").write_text("print('evil runs')")
    flag = f"--model={name}"
    for function, argv in ((load_config, [flag]), (train.main, [flag, "--help"])):
        said = refused(function, argv)
        assert said.startswith(f"no {name}.py beside model.py")
    assert capsys.readouterr().out == ""


def test_config_ones_own_gpt2_or_adamw_is_taken(models):
    """Though model.py and optimizer.py have these names."""
    assert model_file("gpt2").__name__ == "model"
    (models / "gpt2.py").touch()
    (models / "adamw.py").write_text("make = lambda model, cfg: 'my own'")
    assert model_file("gpt2").__name__ == "gpt2"
    assert train.make_optimizer(None, Config(optimizer="adamw")) == "my own"


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


def test_config_home_is_where_a_path_says(tmp_path, monkeypatch):
    """A shell leaves the ~ of --out_dir=~/x."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.py").write_text("init_from = '~/other'\nout_dir = '~/mine'\nfreeze = 'a~b'")
    cfg = load_config([str(tmp_path / "c.py"), "--out_dir=~/x"])
    assert cfg.out_dir == f"{tmp_path}/x" and cfg.init_from == f"{tmp_path}/other"
    assert cfg.freeze == "a~b"


def test_config_auto_dtype_is_what_the_device_is_fast_at(tmp, monkeypatch):
    assert resolve(tiny(tmp, dtype="auto"), ONE).dtype == "float32"
    for capability, dtype in (((9, 0), "bfloat16"), ((8, 0), "bfloat16"), ((7, 5), "float16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert best_dtype(torch.device("cuda")) == dtype


# ---------- what is refused, in all commands ------------------------------------

# Below each command its mistakes, several with a ; between them, and after the | the remedy. The
# line must name the key of the last word, or the path that it is. ODD/ has the files below, and
# TOY stands for the keys of a small run. "load" only reads the keys, "resolve" asks what they mean
# on two ranks, "two_ranks" trains.
TABLE = r"""
load
  --n_lyaer=2; ODD/unknown.py | --help
  --kind=b | --help
  --n_layer; --n_lyaer | --key=value
  config/none.py | No such file
  ODD/loop.py | begins with _
  ODD/typed.py; ODD/keys.yaml | key = value
  --freeze=['wte']; --freeze=[wte,wpe] | is a list
  ODD/syntax.py; ODD/exits.py | config file
  --n_layer=twelve; --n_layer=True; --n_layer=1.5; ODD/none.py | must be of type int
  --compile=maybe; --compile=1; ODD/truth.py | must be of type bool
  --dtype=fp8 | 'float32'
  --n_head=12 --n_embd=100 | multiple of n_head
  --model=none | no none.py
resolve TOY
  --strategy=single | python train.py
  --gradient_accumulation_steps=3; --gradient_accumulation_steps=0 | multiple of 2
  --strategy=full_shard --shard_group_size=2 | hybrid_shard
  --strategy=hybrid_shard --shard_group_size=3 | must divide 2 ranks
  --strategy=hybrid_shard --shard_group_size=1 | more than 1
  --out_dir=s3://bucket/run | not an address
  --grad_clip=-1; --keep_checkpoints=-1; --save_interval=-1; --seed=-1 | must be 0 or more
  --batch_size=0; --eval_interval=0; --eval_iters=0; --log_interval=0 | must be 1 or more
  --lr_schedule=wsd --min_lr=0.1; --min_lr=0.1 | above learning_rate
train.py TOY
  --strategy=full_shard | torchrun
  --dataset=nowhere | data/prepare.py
  --dataset=ODD/empty; --dataset=ODD/half | prepare it again
  --dataset=ODD/beyond; --dataset=ODD/npy | fix meta.json
  --dataset=ODD/short; --block_size=100000 | lower it
  --freeze=nothing | one is transformer.
  --optimizer=sdg | no sdg.py
  --init_from=resume | no checkpoint in
  --vocab_size=10 | tokenizer
two_ranks TOY
  --dataset=nowhere | data/prepare.py
sample.py
  --bogus; --top_k=x | argument
  --start=FILE:/nowhere | No such file
  --out_dir=ODD/nothing | no checkpoint in
data/prepare.py
  ODD/a.txt ODD/a.txt | name comes before
data/prepare.py x --tokenizer=bytes --out=ODD/new
  --column=a ODD/body.jsonl | that has some, here body
  ODD/bad.txt | 'utf-8' codec
  ODD/none.txt; ODD/a.txt ODD/none.txt; ODD/*.txt; ODD/none | find any data file
  ODD/folder | Is a directory
  some/dataset | on the Hub
  ODD/a.txt --val_split=validation | pass --val_split= for those
  owner/name --val_fraction=0.1 --val_split=validation | pass --val_split= for those
  ODD/a.txt --limit=0; ODD/a.txt --val_fraction=0; ODD/a.txt --val_fraction=1 | must be
  ODD/a.txt --limit=x; ODD/a.txt --workers=1.5; ODD/a.txt --bogus; ODD/a.txt --chat | argument
data/shakespeare_char/prepare.py
  --input=ODD/a.txt | sha256
  --input=ODD/none | --input
  --bogus | argument
"""

FILES = {  # in latin-1
    "unknown.py": "n_lyaer = 2", "none.py": "n_layer = None", "syntax.py": "n_layer = (",
    "loop.py": "for i in range(3):\n    n_layer = i", "truth.py": "compile = 1",
    "typed.py": "n_layer: 2", "keys.yaml": "n_layer: 2", "exits.py": "exit()",
    "a.txt": "x", "bad.txt": "abc \xff", "tokenizer.json": "{}",
    "body.jsonl": '{"body": "x"}\n',
    # in copies of the toy data
    "npy/train.bin": "\x93NUMPY\1\0v\0" + 118 * " " + "\5\0\6\0" * 99,
    "empty/train.bin": "", "half/train.bin": "\0" * 101, "short/train.bin": "\0" * 32,
    "beyond/train.bin": "\x43\0" * 99}  # tokens of 67


@pytest.fixture(scope="module")
def odd(tmp, tmp_path_factory):
    """The directory ODD."""
    path = tmp_path_factory.mktemp("odd")
    for name in ("nothing", "folder/train.bin"):
        (path / name).mkdir(parents=True)
    for name, text in FILES.items():
        if "/" in name:
            shutil.copytree(f"{tmp}/toy", (path / name).parent)
        (path / name).write_text(text, "latin-1")
    return str(path)


def pytest_generate_tests(metafunc):
    if "mistake" in metafunc.fixturenames:
        metafunc.parametrize("command, mistake, remedy", rows(metafunc.module.TABLE))


def rows(table):
    rows, command = [], None
    for line in table.strip().splitlines():
        if line.startswith(" "):
            mistakes, _, remedy = line.strip().rpartition(" | ")
            rows += [(command, mistake, remedy) for mistake in mistakes.split("; ")]
        else:
            command = line
    return rows


def test_mistake_is_one_line(tmp, odd, tmp_path, monkeypatch, command, mistake, remedy):
    monkeypatch.chdir(HERE)
    toy = " ".join(arguments(tmp, tmp_path / "out", max_iters=1))
    words = f"{command} {mistake}".replace("ODD", odd)
    command, *argv = words.replace("TOY", toy).split()
    if command == "load":
        said = refused(load_config, argv)
    elif command == "resolve":
        said = refused(resolve, load_config(argv), World(size=2, local_size=2), True)
    else:
        on_two = command == "two_ranks"
        p = Ranks(2, train.main, argv).finish(60) if on_two else script(command, *argv)
        said = p.stderr.strip()
        assert p.returncode == 1 and "\n" not in said, said
    if "No module named" in said:
        pytest.skip(said)
    key, _, value = argv[-1].removeprefix("--").partition("=")
    is_name = re.search("[/=]", value) or remedy == f"no {value}.py"
    names = [key, value] if is_name else [key]
    assert any(name in said for name in names) and remedy in said, said
