"""
fsdp.py alone: copied into an empty directory it shards somebody else's model, by the lines that
its docstring shows.

    python -m pytest -q tests/test_alone.py
"""

import os
import re
import shutil
import sys
import textwrap

import pytest
import torch
from harness import HERE, shell
from torch import nn

# somebody's own program: a stack of PyTorch's encoder layers, which knows nothing of this project
PROGRAM = '''
import os, zlib
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 36)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(36, 3, 70, dropout=0.0, batch_first=True)
            for _ in range(4))
        self.head = nn.Linear(36, 50)

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

def my_initial_value(name, shape):
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator) * 0.1 + float(name.endswith("norm.weight"))

def my_loss(logits, y):
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), y.flatten())

def tokens(step, i, rank):
    generator = torch.Generator().manual_seed(100 * step + 10 * i + rank)
    return torch.randint(50, (2, 3, 8), generator=generator)  # x, y

STEPS, MICRO_BATCHES = 3, 2
'''
ON_RANKS = '''
from fsdp import *

rank = int(os.environ["RANK"])
steps = [[tokens(s, i, rank) for i in range(MICRO_BATCHES)] for s in range(STEPS)]
DOCSTRING
rows = {name: p.to_local().shape for name, p in model.named_parameters()}
assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in model.parameters())
found = dict(state=state, norm=norm, loss=loss.detach(), logits=logits, rows=rows)
torch.save(found, f"found-{rank}.pt")
dist.barrier()
os._exit(0)
'''


def docstring_lines():
    with open(os.path.join(HERE, "fsdp.py")) as f:
        block = re.search(r"your own project:\n\n(.*?)\n\nA \*unit\*", f.read(), re.S)[1]
    return textwrap.dedent(block)


def one_process():
    """The same training in plain PyTorch: all ranks' rows as one batch."""
    scope = {}
    exec(PROGRAM, scope)
    model = scope["MyModel"]()
    for name, p in model.named_parameters():
        p.data.copy_(scope["my_initial_value"](name, p.shape))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        for i in range(2):
            x, y = torch.cat([scope["tokens"](step, i, rank) for rank in (0, 1)], dim=1)
            loss = scope["my_loss"](model(x), y) / 2
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        logits = model(x)
    return dict(state=dict(model.named_parameters()), norm=norm, loss=loss, logits=logits)


def test_alone_it_shards_another_model(tmp_path):
    """Partial offload, selective checkpointing, accumulation, clipping, inference, full gather."""
    program = PROGRAM + ON_RANKS.replace("DOCSTRING", docstring_lines())
    for printed, here in {"cpu:gloo,cuda:nccl": "gloo", '"cuda"': '"cpu"',
                          "torch.bfloat16": "torch.float32"}.items():
        assert printed in program
        program = program.replace(printed, here)
    (tmp_path / "program.py").write_text(program)
    shutil.copy(os.path.join(HERE, "fsdp.py"), tmp_path)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    p = shell(sys.executable, *launcher, "program.py", cwd=tmp_path, env=dict(PYTHONPATH=""))
    assert p.returncode == 0, p.stderr
    zero, one = (torch.load(tmp_path / f"found-{rank}.pt") for rank in (0, 1))
    expected = one_process()
    assert set(one["state"].values()) == {None}
    for name, p in expected["state"].items():
        assert (zero["state"][name] - p).norm() <= 1e-5 * p.norm(), name
        rows = [found["rows"][name][0] for found in (zero, one)]
        assert rows == [-(-len(p) // 2), len(p) // 2], name
    assert zero["norm"] == one["norm"] == pytest.approx(expected["norm"].item(), rel=1e-5)
    mean = (zero["loss"] + one["loss"]).item() / 2
    assert mean == pytest.approx(expected["loss"].item(), rel=1e-5)
    logits = torch.cat((zero["logits"], one["logits"]))
    assert (logits - expected["logits"]).norm() <= 2e-5 * expected["logits"].norm()
