"""
A model of your own under FSDP2, with fsdp.py, checks.py, compare.py and activations.py, and
nothing else of this repository. A small vision transformer with rotary positions learns to tell ten
patterns under noise.

    torchrun --standalone --nproc_per_node=2 docs/own_model.py    # sharded
    python docs/own_model.py                                      # not: the same losses

With --compare=FILE the first run writes its steps, and each later one says whether it is the same.

Go on with another number of ranks. Or compute in bfloat16, and with less memory in less time:

    torchrun --standalone --nproc_per_node=2 docs/own_model.py --save=out-own
    torchrun --standalone --nproc_per_node=3 docs/own_model.py --save=out-own --resume --steps=60
    torchrun --standalone --nproc_per_node=2 docs/own_model.py --bf16 --checkpointing --fused
    torchrun --standalone --nproc_per_node=2 docs/own_model.py --bf16 --compile --average=0.9

docs/your_model.md says what FSDP2 asks of a model, and has recipes for what is not here.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))  # where these four lie:
import activations
import checks
import compare
import fsdp

parser = argparse.ArgumentParser()
parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
parser.add_argument("--checkpointing", action="store_true", help="recompute what is cheap")
parser.add_argument("--compile", action="store_true", help="compile each block")
parser.add_argument("--fused", action="store_true", help="AdamW in one kernel, with no temporaries")
parser.add_argument("--compare", metavar="FILE", help="compare steps with FILE, or make it")
parser.add_argument("--average", type=float, help="evaluate an average of the weights; its decay")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--save", help="a directory for checkpoints, and the whole weights")
parser.add_argument("--resume", action="store_true", help="go on after the newest of --save")
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1 = nn.LayerNorm(64)
        self.qkv = nn.Linear(64, 3 * 64)
        self.out = nn.Linear(64, 64)
        self.norm_2 = nn.LayerNorm(64)
        self.mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        # Constants. On the CPU, so that they have values if the model is built on meta.
        angles = torch.outer(torch.arange(16, device="cpu"), torch.logspace(0, -2, 8, device="cpu"))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x):  # (B, 16, 64)
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, 4, 16)).transpose(1, 3).unbind(2)
        # Buffers stay in fp32, and so does what they turn; v is in bf16, if that is asked for.
        q, k = self.turn(q).type_as(v), self.turn(k).type_as(v)  # (B, 4 heads, 16, 16)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))

    def turn(self, x):
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * self.cos - b * self.sin, a * self.sin + b * self.cos], dim=-1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 64, kernel_size=4, stride=4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(64, 10)

    def forward(self, images):  # (B, 1, 16, 16) to (B, 10)
        x = self.patches(images).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


def images_of(step):
    """This rank's share of a step's 96 images and their labels. All shares are equal, so the mean
    over ranks and micro-batches is the mean over images. (With a data set: PyTorch's
    DistributedSampler. Call its set_epoch, or each epoch has the same order; and it repeats some
    samples, so that ranks have equally many: drop_last=True, or in an evaluation weights of 0.)"""
    patterns = torch.randn(10, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + step)
    y = torch.randint(10, (96,), generator=generator)
    x = patterns[y] + torch.randn(96, 1, 16, 16, generator=generator)
    return x[rank::size].to(device), y[rank::size].to(device)


def mean_over_ranks(value):
    value = value / size
    if is_sharded:
        dist.all_reduce(value)
    return value.item()


def state_of(step):
    """All that a checkpoint has. Tensors are this rank's rows."""
    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": state, "scheduler": scheduler.state_dict()}
    if average:
        saved["average"] = average.state_dict()
    return {**saved, "step": step}


def save(step):
    """Each rank writes its rows. A path of its own for each step, since a save over an old one that
    is cut off would leave rows of two steps; the last two stay."""
    had_state = bool(optimizer.state)
    saved = state_of(step)
    if optimizer.state and not had_state:  # get_state_dict made it by a step, which Adam counts
        raise SystemExit(f"save({step}): save after the first step, not before")
    dcp.save(saved, checkpoint_id=f"{args.save}/step-{step:09}")
    if rank == 0:
        for path in checkpoints()[:-2]:
            shutil.rmtree(path)


def checkpoints():
    """Those that are complete, the newest last: .metadata is written at the end."""
    steps = Path(args.save).glob(f"step-{9 * '[0-9]'}/.metadata")  # not copies under other names
    return sorted(path.parent for path in steps)


def resume():
    """On any number of ranks. Returns the step. Learning rate and weight decay are the saved ones:
    set others after this. (PyTorch unpickles parts of the files: read only those you trust.)"""
    newest = checkpoints()[-1:]
    if not newest:
        raise SystemExit(f"--resume: no checkpoint in --save={args.save}")
    if is_sharded:  # rank 0's, since a network's disk may not show all ranks the same
        dist.broadcast_object_list(newest)
    optimizer.zero_grad()  # beside gradients get_state_dict would make no state to read into
    saved = state_of(0)
    planner = dcp.DefaultLoadPlanner()
    dcp.load(saved, checkpoint_id=newest[0], planner=planner)  # the average takes it in place
    unread = planner.metadata.state_dict_metadata.keys() - planner.state_dict.keys()
    if unread:  # of a larger model, say, or of a dict that is filled later: save that as a text
        raise SystemExit(f"--resume: {newest[0]} has {min(unread)}, and this program does not")
    set_state_dict(
        model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])  # after the optimizer, whose rates it sets
    return saved["step"]


# 1) The processes, which torchrun starts. Each takes its own GPU. Without any they take the CPU.
is_sharded = "RANK" in os.environ  # else this process is alone
rank = int(os.environ.get("RANK", 0))
size = int(os.environ.get("WORLD_SIZE", 1))
if 96 % (2 * size):
    raise SystemExit(f"{size} processes cannot share 96 images equally: take 1, 2, 3, 4, 6 or 8")
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        raise SystemExit(f"each process needs a GPU, and {torch.cuda.device_count()} are here")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
if is_sharded:
    dist.init_process_group("nccl" if device == "cuda" else "gloo")

# 2) The model. Every rank builds all of it, with the same values, and keeps its rows. (If that is
#    too much memory: docs/your_model.md builds it without any.) The units are its blocks; a large
#    embedding and head would be two more, [model.embedding, *model.blocks, model.head].
torch.manual_seed(0)
model = Model()
checks.before_sharding(model.to(device))
average = None
if args.average:  # copied before checkpointing and compiling, which bind to this model's blocks
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(args.average))
if args.checkpointing:
    activations.checkpoint_activations(model.blocks, "selective")
if args.compile:
    activations.compile_blocks(model.blocks)
if is_sharded:
    policy = fsdp.mixed_precision(torch.bfloat16) if args.bf16 else None
    mesh = fsdp.make_mesh(device)
    fsdp.shard(model, model.blocks, mesh, mp_policy=policy)
    if average:
        fsdp.shard(average.module, average.module.blocks, mesh, mp_policy=policy)
if rank == 0:
    print(f"{size} x {device}, {'sharded' if is_sharded else 'not sharded'}", flush=True)

# 3) The optimizer, after `shard`, which replaces the parameters.
matrices = [p for p in model.parameters() if p.dim() > 1]
vectors = [p for p in model.parameters() if p.dim() == 1]
groups = [dict(params=matrices, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)]
optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=args.fused)
checks.after_building(model, optimizer)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)  # warm up
if args.save and not args.resume and checkpoints():  # `save` would take its steps for older ones
    raise SystemExit(f"--save={args.save} has a run: pass --resume, or another directory")
first = resume() if args.resume else 0
compared = args.compare and compare.Compare(
    args.compare, model, {f"blocks.{i}": block for i, block in enumerate(model.blocks)})

# 4) Train. A step has two micro-batches. (Run a new model's first steps inside
#    compare.check_units(model).)
for step in range(first + 1, args.steps + 1):
    torch.manual_seed(step * size + rank)  # dropout and noise of this rank's own
    images, labels = images_of(step)
    total = torch.zeros((), device=device)
    for i, (x, y) in enumerate(zip(images.chunk(2), labels.chunk(2))):
        fsdp.set_grad_sync(model, is_last_micro_batch=i == 1)
        with torch.autocast(device, torch.bfloat16, enabled=args.bf16 and not is_sharded):
            logits = model(x)  # gathers unit by unit
        loss = F.cross_entropy(logits.float(), y) / 2  # bfloat16 is too coarse for a loss
        loss.backward()  # gathers again, averages gradients over ranks, keeps its rows of them
        total += loss.detach()
    if compared:
        compared.step(step, optimizer, total)
    norm = fsdp.clip_grad_norm(model, 1.0)
    optimizer.step()
    scheduler.step()
    if average:
        average.update_parameters(model)
    fsdp.zero_grad(model, optimizer)
    saves = args.save and (step % 20 == 0 or step == args.steps)
    if step % 10 == 0 or step == args.steps or saves:
        mean = mean_over_ranks(total)
        if rank == 0:
            print(f"step {step}: loss {mean:.4f}, norm {norm:.3f}", flush=True)
        if not norm.isfinite():  # the same on all ranks; and this step is not saved
            raise SystemExit(f"step {step}: a gradient is not finite; lower the learning rate")
    if saves:
        checks.after_first_step(model, optimizer)  # that a checkpoint holds what the optimizer has
        save(step)

# 5) Evaluate, on every rank, since a forward gathers.
result = average.module if average else model
with fsdp.inference(result):
    x, y = images_of(-2)
    right = mean_over_ranks((result(x).argmax(dim=1) == y).float().mean())
if rank == 0:
    print(f"{right:.0%} of new images are right", flush=True)
if rank == 0 and compared:
    print(compared, flush=True)

# 6) The whole weights in one file, to use elsewhere.
if args.save:
    state = result.state_dict()  # of a module with get_extra_state it has more than tensors
    whole = {name: fsdp.gather_full(t) for name, t in state.items() if torch.is_tensor(t)}
    if rank == 0:
        torch.save(whole, f"{args.save}/weights.pt")

# 7) Leave. On CPUs gloo's threads may abort a process that ends in the usual way, so this one skips
#    Python's clean-up: close your own files and loggers before it.
if is_sharded:
    dist.barrier()
    if device == "cpu":
        sys.stdout.flush()
        os._exit(0)
    dist.destroy_process_group()
