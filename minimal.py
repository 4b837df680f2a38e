"""
FSDP2 at its smallest. A small GPT learns the text of torch/__init__.py:

    torchrun --standalone --nproc_per_node=2 minimal.py

Each process (a rank) keeps some rows of every parameter. It holds a whole block only while
that block runs (on GPUs the next one too). Try 1 and 3 processes too: the losses are the same.
fsdp.py has the same steps with options, and train.py with everything that a run needs.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from model import GPT, GPTConfig

if "WORLD_SIZE" not in os.environ:
    raise SystemExit("start it with: torchrun --standalone --nproc_per_node=2 minimal.py")
size = int(os.environ["WORLD_SIZE"])
if 12 % size:
    raise SystemExit(f"{size} processes cannot share 12 samples: take 1, 2, 3, 4, 6 or 12")

# 1) The mesh: the ranks that share one copy of the model. Creating it connects them and
#    assigns each its GPU.
local_rank = int(os.environ["LOCAL_RANK"])  # the rank on this node, and its GPU's index
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
# Each rank needs its own GPU, since NCCL refuses two ranks on one. Else they take the CPU.
device = "cuda" if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
if device == "cpu":
    dist.init_process_group("gloo")  # for GPUs, init_device_mesh opens NCCL's
mesh = dist.init_device_mesh(device, (size,))
rank = mesh.get_rank()

# 2) The model on the meta device: names and shapes, no memory.
config = GPTConfig(block_size=64, vocab_size=256, n_layer=4, n_head=4, n_embd=128)
with torch.device("meta"):
    model = GPT(config)

# 3) Shard it. Each block is a unit: gathered before it runs, freed after.
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)  # the root: all the rest

# 4) Allocate memory, only now and only for this rank's rows. Every rank draws the same
#    initial values and keeps its rows.
model.to_empty(device=device)
for name, p in model.named_parameters():
    full = model.initial_value(name, p.shape, seed=1337)
    # It draws what it is asked for: full[:] is a tensor of all rows. src_data_rank=None: send
    # nothing, since every rank has drawn them.
    rows = distribute_tensor(full[:], mesh, p.placements, src_data_rank=None)
    p.data.copy_(rows)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # of this rank's rows


# (Steps 1 to 4 in numbers: what rank 0 keeps, and what it holds while a block runs.)
def print0(line):
    if rank == 0:
        print(line, flush=True)


def look(*args):
    """Called in block 1. A sharded parameter is a DTensor, a gathered one a plain tensor."""
    whole = 0
    for p in model.parameters():
        if not isinstance(p, DTensor):
            whole += p.numel()
    print0(f"while block 1 runs, it also holds {whole:,} whole: "
           "block 1 and the root")
    hook.remove()


mlp = model.blocks[1].mlp
p = mlp.c_fc.weight
print0(f"c_fc.weight has {len(p)} rows, "
       f"and rank 0 of {size} keeps {len(p.to_local())} of them")
own = sum(p.to_local().numel() for p in model.parameters())
total = sum(p.numel() for p in model.parameters())
print0(f"at rest rank 0 keeps {own:,} of {total:,} parameters, on {device}")
hook = mlp.register_forward_hook(look)

# 5) Train. Every rank draws the same 12 samples and takes its share.
with open(torch.__file__, "rb") as f:
    text = torch.tensor(list(f.read()))  # one token per byte
for step in range(101):
    torch.manual_seed(step)
    starts = torch.randint(len(text) - 64, (12, 1))
    starts = starts.tensor_split(size)[rank]
    tokens = text[starts + torch.arange(65)].to(device)  # (12 / size, 65)
    x = tokens[:, :-1]
    y = tokens[:, 1:]
    logits, loss = model(x, y)
    loss.backward()  # gathers a unit, averages its gradients over ranks, keeps its rows
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0:
        mean = loss.detach() / size
        dist.all_reduce(mean)
        print0(f"step {step}: loss {mean:.3f}")

# 6) A checkpoint: all ranks gather each parameter, and rank 0 keeps it.
state = {}
for name, p in model.state_dict().items():
    full = p.full_tensor()
    if rank == 0:
        state[name] = full.cpu()
if rank == 0:
    torch.save(state, "out-minimal.pt")
dist.barrier(device_ids=[local_rank] if device == "cuda" else None)
os._exit(0)  # after a normal exit gloo's threads may abort the process: see ranks.run
