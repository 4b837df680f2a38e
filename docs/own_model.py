"""
A model of your own under FSDP2, with fsdp.py and checks.py, and nothing else of this repository. A
small vision transformer, of PyTorch's own layers, learns to tell ten patterns under noise.

    torchrun --standalone --nproc_per_node=2 docs/own_model.py           # sharded
    torchrun --standalone --nproc_per_node=2 docs/own_model.py --plain   # not: the same losses

Go on with another number of ranks, or in bfloat16:

    torchrun --standalone --nproc_per_node=2 docs/own_model.py --save=out-own
    torchrun --standalone --nproc_per_node=3 docs/own_model.py --resume=out-own/step-40 --steps=60
    torchrun --standalone --nproc_per_node=2 docs/own_model.py --bf16

docs/your_model.md says what FSDP2 asks of a model, and has recipes for what is not here.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))  # where these two lie:
import checks
import fsdp

parser = argparse.ArgumentParser()
parser.add_argument("--plain", action="store_true", help="train in one process, without FSDP2")
parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--save", help="a directory for checkpoints, and the whole weights")
parser.add_argument("--resume", help="a checkpoint, such as out-own/step-40")
args = parser.parse_args()
if args.resume and not os.path.exists(f"{args.resume}/.metadata"):
    raise SystemExit(f"--resume={args.resume}: no checkpoint there; pass one that --save has made")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 64, kernel_size=4, stride=4)
        angles = torch.outer(torch.arange(16), torch.logspace(0, -2, 32))
        self.register_buffer("places", torch.cat([angles.sin(), angles.cos()], dim=1))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(4))
        self.head = nn.Linear(64, 10)

    def forward(self, images):  # (B, 1, 16, 16) to (B, 10)
        x = self.patches(images).flatten(2).mT
        x = x + self.places.type_as(x)  # a buffer stays in fp32
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


def images_of(step):
    """This rank's share of a step's 96 images and their labels. All shares are equal, so the mean
    over ranks and micro-batches is the mean over images. (With a data set: PyTorch's
    DistributedSampler.)"""
    patterns = torch.randn(10, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + step)
    y = torch.randint(10, (96,), generator=generator)
    x = patterns[y] + torch.randn(96, 1, 16, 16, generator=generator)
    return x[rank::size].to(device), y[rank::size].to(device)


def mean_over_ranks(value):
    if is_sharded:
        dist.all_reduce(value)
    return value.item() / size


def save(path, step):
    """Each rank writes its rows. Take a new path each time: a save over an old one that is cut off
    leaves rows of two steps."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "step": step}, checkpoint_id=path)


def resume(path):
    """On any number of ranks. Returns the step. (PyTorch unpickles parts of the files, so read only
    those that you trust.)"""
    weights, state = get_state_dict(model, optimizer)  # this rank's rows, to read into
    saved = {"model": weights, "optimizer": state, "step": 0}
    dcp.load(saved, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return saved["step"]


# 1) The processes, which torchrun starts. Each takes its own GPU; if there are too few, the CPU.
is_sharded = "RANK" in os.environ and not args.plain
rank = int(os.environ.get("RANK", 0))
if args.plain and rank:
    sys.exit()  # rank 0 trains alone
size = int(os.environ["WORLD_SIZE"]) if is_sharded else 1
if 96 % (2 * size):
    raise SystemExit(f"{size} processes cannot share 96 images equally: take 1, 2, 3, 4, 6 or 8")
device = "cpu"
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
if gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
    device = "cuda"
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
if is_sharded:
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")

# 2) The model. Every rank builds all of it, with the same values, and keeps its rows. (If that is
#    too much memory: docs/your_model.md builds it without any.)
torch.manual_seed(0)
model = Model()
checks.before_sharding(model)
if is_sharded:
    policy = fsdp.mixed_precision(torch.bfloat16) if args.bf16 else None
    fsdp.shard(model, model.blocks, fsdp.make_mesh(device), mp_policy=policy)
else:
    model.to(device)
if rank == 0:
    print(f"{size} x {device}, {'sharded' if is_sharded else 'not sharded'}", flush=True)

# 3) The optimizer, after `shard`, which replaces the parameters.
matrices = [p for p in model.parameters() if p.dim() > 1]
vectors = [p for p in model.parameters() if p.dim() == 1]
groups = [dict(params=matrices, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)]
optimizer = torch.optim.AdamW(groups, lr=1e-4)
checks.after_building(model, optimizer)
step = first = resume(args.resume) if args.resume else 0

# 4) Train. A step has two micro-batches. (Run a new model's first steps inside
#    checks.check_units(model).)
while step < args.steps:
    torch.manual_seed(1 + step * size + rank)  # dropout and noise of this rank's own
    images, labels = images_of(step)
    total = torch.zeros((), device=device)
    for i, (x, y) in enumerate(zip(images.chunk(2), labels.chunk(2))):
        fsdp.set_grad_sync(model, is_last_micro_batch=i == 1)
        with torch.autocast(device, torch.bfloat16, enabled=args.bf16 and not is_sharded):
            logits = model(x)  # gathers unit by unit
        loss = F.cross_entropy(logits.float(), y) / 2  # bfloat16 is too coarse for a loss
        loss.backward()  # gathers again, averages gradients over ranks, keeps its rows of them
        total += loss.detach()
    norm = fsdp.clip_grad_norm(model, 1.0)
    optimizer.step()
    fsdp.zero_grad(model, optimizer)
    if step == first:
        checks.after_first_step(model, optimizer)
    step += 1
    if step % 10 == 0:
        mean = mean_over_ranks(total)
        if rank == 0:
            print(f"step {step}: loss {mean:.4f}, norm {norm:.3f}", flush=True)
    if args.save and (step % 20 == 0 or step == args.steps):
        save(f"{args.save}/step-{step}", step)

# 5) Evaluate, on every rank, since a forward gathers.
with fsdp.inference(model):
    x, y = images_of(-2)
    right = mean_over_ranks((model(x).argmax(dim=1) == y).float().mean())
if rank == 0:
    print(f"{right:.0%} of new images are right", flush=True)

# 6) The whole weights in one file, to use elsewhere.
if args.save:
    os.makedirs(args.save, exist_ok=True)
    whole = {name: fsdp.gather_full(t) for name, t in model.state_dict().items()}
    if rank == 0:
        torch.save(whole, f"{args.save}/weights.pt")
if is_sharded:
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way
