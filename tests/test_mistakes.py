"""
What is refused, in all commands: one line with the key and a remedy, exit code 1, no traceback.

    python -m pytest -q tests/test_mistakes.py
"""

import os
import re
import shutil

import pytest
import torch
from harness import HERE, Ranks, arguments, read_ckpt, refused, run_training, script

import train
from configurator import load_config, resolve
from ranks import World

os.environ["HF_HUB_OFFLINE"] = "1"  # before its library is imported, which looks once

# Below each command its mistakes, several with a ; between them, and after the | the remedy. The
# line must name the key of the last word, or the path that it is. ODD/ has the files below, and
# TOY stands for the keys of a small run. "load" only reads the keys, "resolve" asks what they mean
# on two ranks, "two_ranks" trains.
TABLE = r"""
load
  --n_lyaer=2; --n_lyaer; ODD/unknown.py | n_layer
  --kind=b | --help
  ODD/loop.py | helper begins with _
  --n_layer; config/none.py | --key=value
  ODD/syntax.py; ODD/exits.py | config file
  --n_layer=twelve; --n_layer=True; --n_layer=1.5; --max_iters=1e400; ODD/text.py | whole number
  --n_layer=0; --batch_size=0 | at least 1
  --learning_rate=1e400; --learning_rate=-1 | finite
  --compile=maybe; --compile=1; ODD/truth.py | True or False
  --out_dir=; --dataset= | path
  --dropout=1.0; --beta1=1.0 | below 1
  --cpu_offload=1.5 | fraction
  --loss_scale=0; --loss_scale=-4 | above 0
  --dtype=fp8 | 'float32'
  --device=tpu | cuda
  --n_head=12 --n_embd=100 | multiple of n_head
  --model=gpt2+; --model=gpt2+none; --model=gpt2+model | model=
resolve TOY
  --strategy=single | python train.py
  --gradient_accumulation_steps=3 | multiple of 2
  --strategy=ddp --cpu_offload=0.5; --strategy=ddp --wrap_min_params=10 | full_shard
  --strategy=ddp --prefetch_blocks=1; --strategy=ddp --dtype=float8 | full_shard
  --strategy=full_shard --shard_group_size=2 | hybrid_shard
  --strategy=hybrid_shard --shard_group_size=3 | divisor of 2
  --learning_rate=2e-5; --lr_schedule=wsd --learning_rate=2e-5 | --min_lr=2e-06
  --activation_offload=True | --activation_checkpointing=full
  --activation_checkpointing=selective --activation_offload=True | activation_checkpointing=full
  --compile=True --activation_checkpointing=full --activation_offload=True | --compile=False
  --dtype=float8 --cpu_offload=0.5 | --dtype=bfloat16
  --strategy=full_shard --dtype=float8 --reshard_group_size=2 | --reshard_group_size=0
  --strategy=shard_grad_op --reshard_group_size=2 | full_shard, hybrid_shard
  --strategy=full_shard --reshard_group_size=3 | divisor of 2
  --strategy=full_shard --reshard_group_size=1 | divisor of 2, from 2 on
  --strategy=ddp --reduce_dtype=bfloat16 | full_shard
  --dtype=float32 --frozen_dtype=bfloat16 | or --dtype=bfloat16
  --strategy=ddp --reshard_group_size=2 | full_shard, hybrid_shard
  --activation_checkpointing=selective --wrap_min_params=9 | full checkpointing
  --compile=True --loss_chunks=2 --wrap_min_params=9 | --wrap_min_params=0
  --activation_checkpointing=full --prefetch_blocks=1 --wrap_min_params=9 | --prefetch_blocks=0
train.py TOY
  --strategy=full_shard | torchrun
  --grad_sync=last | it is for ddp
  --dataset=nowhere; --dataset=LONG | data/prepare.py
  --dataset=ODD/folder | file of tokens
  --dataset=ODD/empty; --dataset=ODD/half | prepare it again
  --dataset=ODD/list; --dataset=ODD/text; --dataset=ODD/zero | again
  --dataset=ODD/names | tokenizer
  --dataset=ODD/beyond | fix meta.json
  --dataset=ODD/wide; --dataset=ODD/wider; --dataset=ODD/real; --dataset=ODD/npy | np.uint16
  --dataset=ODD/short; --block_size=100000 | lower it
  --freeze=nothing; --freeze=. | names look like transformer.
  --freeze=( | regular expression
  --optimizer=sdg | no sdg.py
  --device=cuda:99 | --device=cpu
  --init_from=resume | use scratch
  --out_dir=/proc/x; --out_dir=ODD/a.txt/out | pass another
  --n_embd=3e6 --batch_size=1 | lower batch_size
  --vocab_size=10; --vocab_size=1e9 | --vocab_size=67
two_ranks TOY
  --n_lyaer=2 | n_layer
  --dataset=nowhere | data/prepare.py
  --out_dir=/proc/x | pass another
train.py TOY --init_from=resume --eval_only=True
  --out_dir=ODD/out-number; --out_dir=ODD/out-loss | another out_dir
  --out_dir=ODD/out-shorter; --out_dir=ODD/out-moments | of another model
  --out_dir=ODD/whole --n_layer=2 | --n_layer=3
  --out_dir=ODD/whole --n_embd=60; --out_dir=ODD/whole --block_size=32 | pass --
sample.py
  --num_samples=0; --temperature=-1; --temperature=nan; --seed=-1 | at least
  --bogus; --top_k=x | argument
  --start=FILE:/nowhere | No such file
  --start=ids:; --start=ids:1,x; --start=ids:1,-2 | ids:1,2,3
  --out_dir=ODD/nothing; --out_dir=ODD/nothing --init_from=scratch | --out_dir
saves.py
  full ODD/nothing | no checkpoint
data/prepare.py x --tokenizer=bytes --out=ODD/new
  ODD/empty.txt --out=ODD/new; ODD/empty.jsonl --out=ODD/new | more text
  ODD/empty.jsonl ODD/body.jsonl; --column=a ODD/body.jsonl | that has some, here body
  ODD/list.jsonl; ODD/nested.json; --column=data ODD/nested.json | here none
  ODD/bad.txt; ODD/bad.csv | convert the file
  ODD/cut.jsonl; ODD/cut.csv; ODD/twice.csv; ODD/long.csv; ODD/number.jsonl | line 2
  ODD/cut.jsonl.gz | must be whole
  ODD/none.txt; ODD/empty.txt ODD/none.txt; ODD/*.txt; ODD/none; ./none | no such file
  ODD/folder | name its files: DIR/*.txt
  some/dataset | it is no file here; for a hub data set check its name and the network
  ODD/a.txt --limit=0; ODD/a.txt --workers=0; ODD/a.txt --shard_tokens=0 | at least 1
  ODD/a.txt --val_fraction=0; ODD/a.txt --val_fraction=1 | above 0 and below 1
  ODD/a.txt --shard_tokens=2000000000 | at most 2**30
  ODD/a.txt --val_split=validation | pass --val_split= for those
  owner/name --val_split=validation --val_fraction=0.1 | pass --val_split= for those
  ODD/a.txt --limit=x; ODD/a.txt --workers=1.5; ODD/a.txt --bogus; ODD/a.txt --chat | argument
  ODD/a.txt --out=ODD/a.txt; ODD/a.txt --out=/proc/x | --out
data/shakespeare_char/prepare.py
  --input=ODD/a.txt | sha256
  --input=ODD/none | --input
  --bogus | argument
data/python_stdlib/prepare.py
  --out=/proc/x | --out
"""

FILES = {  # in latin-1
    "unknown.py": "n_lyaer = 2", "text.py": "n_layer = 'twelve'", "syntax.py": "n_layer = (",
    "loop.py": "for i in range(3):\n    n_layer = i", "truth.py": "compile = 1",
    "exits.py": "exit()", "a.txt": "x", "empty.txt": "",
    "empty.jsonl": "", "bad.txt": "abc \xff", "bad.csv": "text\n\xff\n", "tokenizer.json": "{}",
    "body.jsonl": '{"body": "x"}\n', "list.jsonl": '{"text": ["a"]}\n',
    "nested.json": '{"data": [{"text": "a"}]}', "cut.jsonl.gz": "no gzip",
    "cut.jsonl": '{"text": "a"}\n{"text": "b\n', "cut.csv": 'text\n"a\n',
    "twice.csv": "\ntext,text\na,b\n", "long.csv": "text\na,b\n",
    "number.jsonl": '{"text": 1}\n2\n',
    # in copies of the toy data
    "list/meta.json": "[1]", "text/meta.json": '{"vocab_size": "67"}',
    "zero/meta.json": '{"vocab_size": 0}', "names/meta.json": '{"tokenizer": "byte"}',
    "wide/train.bin": "\5\0\0\0\6\0\0\0" * 99,  # int32
    "wider/train.bin": "\5\0\0\0\0\0\0\0\6\0\0\0\0\0\0\0" * 99,  # int64
    "real/train.bin": "\0\0\x80\x3f\0\0\0\x40" * 99,  # float32
    "npy/train.bin": "\x93NUMPY\1\0v\0" + 118 * " " + "\5\0\6\0" * 99,
    "empty/train.bin": "", "half/train.bin": "\0" * 101, "short/train.bin": "\0" * 32,
    "beyond/train.bin": "\x43\0" * 99}  # tokens of 67


@pytest.fixture(scope="module")
def odd(tmp, tmp_path_factory):
    """The directory ODD."""
    path = str(tmp_path_factory.mktemp("odd"))
    for name in ("nothing", "folder/train.bin"):
        os.makedirs(os.path.join(path, name))
    for name, text in FILES.items():
        if "/" in name:
            shutil.copytree(os.path.join(tmp, "toy"), os.path.join(path, os.path.dirname(name)))
        with open(os.path.join(path, name), "w", encoding="latin-1") as f:
            f.write(text)
    run_training(tmp, os.path.join(path, "whole"), max_iters=1)
    sound = read_ckpt(os.path.join(path, "whole"))
    shorter = {name: t[:-1] if t.dim() == 2 else t for name, t in sound["model"].items()}
    state = sound["optimizer"]["state"]
    moments = {"state": {**state, 0: {**state[0], "exp_avg": torch.zeros(3, 3)}}}
    changes = dict(number=dict(model=3), loss=dict(best_val_loss="low"),
                   shorter=dict(model=shorter), moments=dict(optimizer=moments))
    for name, change in changes.items():
        os.makedirs(os.path.join(path, f"out-{name}"))
        torch.save({**sound, **change}, os.path.join(path, f"out-{name}", "ckpt.pt"))
    return path


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
    words = f"{command} {mistake}".replace("ODD", odd).replace("LONG", 300 * "x")
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
    names = [key, value] if re.search("[/=]", value) else [key]
    assert any(name in said for name in names) and remedy in said, said
