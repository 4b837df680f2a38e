"""
The contract of a model file, which the header of model.py states, as tests of your file.

    python -m pytest -q tests/test_contract.py --model=NAME    # NAME.py, as train.py takes it
    python -m pytest -q tests/test_contract.py                 # gpt2, llama and tests/moe.py

What a failure says first is what to change in the file. Sizes are those of TINY and OTHERS in
tests/harness.py, as far as your keys have these names; for others say --keys=width=30. In a run of
all tests gpt2 is not trained here: test_fsdp.py, test_optimizer.py and test_checkpoint.py do that.
"""

import functools
import os
import re
import shutil
from contextlib import contextmanager
from dataclasses import fields
from unittest.mock import patch

import formulas
import pytest
import torch
from harness import (
    HERE,
    arguments,
    on_ranks,
    plain_model,
    read_ckpt,
    run_compiled,
    run_training,
    two_each,
)
from torch.distributed.fsdp import FSDPModule

import checkpoint
import metrics
import sample
import train
from checkpoint import first_line
from configurator import load_config, model_file
from configurator import resolve as resolved
from data.loader import Batches
from optimizer import learning_rate_at
from ranks import World, setup

KEYS = dict(n_layer=2, max_iters=3, eval_interval=3)  # and those of --keys
USUAL = ["gpt2", "moe", *(["llama"] if os.path.exists(os.path.join(HERE, "llama.py")) else [])]


def pytest_generate_tests(metafunc):
    config = metafunc.config
    KEYS.update(key.split("=", 1) for key in config.getoption("--keys") or [])
    if "model" in metafunc.fixturenames:
        trained = "ranks" in metafunc.fixturenames
        metafunc.parametrize("model", models_of(config, trained), scope="session")


def models_of(config, trained):
    asked_for = config.getoption("--model")
    if asked_for or not trained or any("test_contract" in arg for arg in config.args):
        return asked_for or USUAL
    return [model for model in USUAL if model != "gpt2"]


def small(tmp, model, **overrides):
    """The config of a small run, by way of flags, as a user's."""
    try:
        keys = {**KEYS, "model": model, "vocab_size": 67, **overrides}
        return load_config(arguments(tmp, "out", **keys))
    except SystemExit as e:  # what is wrong with a key
        ask(False, e.code)


def sizes(world):
    return {**two_each(world), **KEYS}


def tokens(n=16):
    """A micro-batch (2, n): x, y."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(67, (2, 2, n), generator=generator)


def ask(good, sentence):
    """Fail with what to change in the file, and nothing else."""
    if not good:
        pytest.fail(sentence, pytrace=False)


@contextmanager
def asked(sentence):
    """The same of an error inside."""
    try:
        yield
    except Exception as e:
        ask(False, f"{sentence} ({type(e).__name__}: {first_line(e)})")


def ran(results, name):
    """What a case returned on each rank."""
    for rank in results[name]:
        last = rank.get("error", "").strip().rpartition("\n")[2]
        ask("error" not in rank,
            f"{name} does not run: use a block's parameters in its own forward only, as elsewhere "
            f"FSDP keeps them in shards ({last})")
    return [rank["value"] for rank in results[name]]


def named(items):
    """The first names, for a message."""
    return ", ".join(list(items)[:3])


# -----------------------------------------------------------------------------
# the file alone


def test_contract_keys(tmp, model):
    module = model_file(model)
    keys = {f.name for f in fields(module.ModelConfig)}
    lacks = {"block_size", "vocab_size", "n_layer"} - keys
    ask(not lacks, f"add to ModelConfig, as other files read it: {named(lacks)}")
    cfg = small(tmp, model)
    assert cfg.vocab_size == 67
    ours = train.meta_model(cfg)
    for name in ("config", "blocks", "initial_value"):
        ask(hasattr(ours, name), f"Model needs {name}, as the header of model.py says")
    ask(isinstance(ours.config, module.ModelConfig), "set self.config = config in Model.__init__")


def test_contract_parameters(tmp, model):
    """Blocks, buffers, and a value for everything, which no other random number changes."""
    ours = train.meta_model(small(tmp, model))
    buffers = [name for name, _ in ours.named_buffers()]
    ask(not buffers, f"compute {named(buffers)} in forward: nobody would shard or fill a buffer")
    ask(len(list(ours.blocks)) > 0, "Model.blocks must be the layers: they are FSDP's units")
    empty = [name for name, m in ours.named_modules() if m in set(ours.blocks)
             and not list(m.parameters())]
    ask(not empty, f"take {named(empty)} out of Model.blocks: it has no parameters")
    random = {}
    for name, p in ours.named_parameters():
        ask(p.is_meta, f"{name} must be made where torch.device says, so by no .to() or cpu()")
        ask(p.dim(), f"make {name} a vector of one number: FSDP2 shards no scalar")
        drawn = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            drawn.append(ours.initial_value(name, p.shape, 5))
        value, again = drawn
        ask(value.isfinite().all(), f"initial_value({name}) must be finite")
        ask(torch.equal(value, again), f"draw initial_value({name}) from seed and name: use normal")
        if value.std() > 0:
            other = ours.initial_value(name, p.shape, 6)
            ask(not torch.equal(value, other), f"draw initial_value({name}) from its seed")
            twin = next((n for n, v in random.items() if torch.equal(v, value)), None)
            ask(not twin, f"{name} and {twin} start equal: draw initial_value from the name too")
            random[name] = value
        on_cpu = value.dtype == torch.float32 and value.device.type == "cpu"
        ask(on_cpu and value.shape == p.shape,
            f"initial_value({name}) must return {tuple(p.shape)} in float32 on the CPU")


def test_contract_forward(tmp, model):
    """Shapes, types, the order of the blocks; on meta and in bf16."""
    ours = plain_model(small(tmp, model)).train()
    x, y = tokens()
    blocks, called = list(ours.blocks), []
    for i, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, i=i: called.append(i))
    logits, loss = ours(x, y)
    once = called == list(range(len(blocks)))
    ask(once, "call each block once, as block(x), not block.forward(x), in the order of blocks")
    ask(logits.shape == (2, 16, 67), "with targets forward returns logits (B, T, V), or None")
    single = loss.shape == () and loss.dtype == torch.float32
    ask(single, "with targets forward returns the mean loss, one number in float32")
    loss.backward()
    last, none = ours(x)
    ask(last.shape == (2, 1, 67) and none is None,
        "without targets forward returns the logits of the last position, (B, 1, V), and None")
    with asked("targets of -1 do not count: use model.cross_entropy"):
        assert ours(x, y.masked_fill(torch.arange(16) > 7, -1))[1].isfinite()
    with torch.autocast("cpu", torch.bfloat16):
        _, half = ours(x, y)
    half.backward()
    ask(half.dtype == torch.float32, "compute the loss in float32: use model.cross_entropy")
    ask(half.item() == pytest.approx(loss.item(), rel=0.02),
        "in bf16 the loss is another: compute in float32 what needs its digits")
    with asked("forward must run on the meta device: let no shape or branch depend on values"):
        idx = torch.zeros(1, 16, dtype=torch.long, device="meta")
        train.meta_model(small(tmp, model))(idx, idx)[1].backward()


def test_contract_loss_chunks(tmp, model):
    ours = plain_model(small(tmp, model)).train()
    if not hasattr(ours, "loss_chunks"):
        pytest.skip("it has no head_loss with loss_chunks, which is optional")
    x, y = tokens()
    y[:, 9:] = -1
    ours(x, y)[1].backward()
    whole = {name: p.grad for name, p in ours.named_parameters()}
    loss = ours(x, y)[1].item()
    ours.zero_grad()
    ours.loss_chunks = 3
    logits, chunked = ours(x, y)
    ask(logits is None, "with loss_chunks no logits are kept: let forward call self.head_loss")
    chunked.backward()
    ask(chunked.item() == pytest.approx(loss, rel=1e-6), "loss_chunks changes the loss")
    for name, p in ours.named_parameters():
        off = (p.grad - whole[name]).norm() <= 1e-6 + 1e-5 * whole[name].norm()
        ask(off, f"loss_chunks changes the gradient of {name}: see head_loss in model.py")


def test_contract_gradients(tmp, model):
    """From a batch of one token, whichever it is: experts without tokens get one too."""
    ours = plain_model(small(tmp, model)).train()
    for token in range(0, 67, 9):
        idx = torch.tensor([[token]])
        ours(idx, idx)[1].backward()
        missing = [name for name, p in ours.named_parameters() if p.grad is None]
        ask(not missing,
            f"{named(missing)} has no gradient from a batch of one token, and ranks would reduce "
            "different gradients: add 0 * what it computes to the output")
        ours.zero_grad()


def test_contract_registration(tmp, model):
    """Root and blocks are registered in the order of their first use: `freeze` relies on it."""
    ours = plain_model(small(tmp, model))
    names, used = {}, []
    for name, module in ours.named_modules():
        block = next((b for b in ours.blocks if module in set(b.modules())), module)
        if module in set(ours.blocks) or list(module.parameters(recurse=False)):
            names.setdefault(block, name)
            module.register_forward_pre_hook(lambda *_, block=block: used.append(block))
    ours(*tokens())
    used = [names[block] for block in dict.fromkeys(used)]
    order = [name for name in names.values() if name in used]
    ask(used == order, f"register modules in the order in which forward uses them: {used}")


def test_contract_generation(tmp, model):
    """Equal with a cache and without, within the context and beyond it."""
    ours = plain_model(small(tmp, model))
    for p in ours.parameters():
        p.data.mul_(3)  # decisive logits
    prompt = tokens(3)[0] % 60
    for length in (8, 40):
        cached, plain = (sample.generate(ours, prompt, length, temperature=0, vocab_size=60,
                                         use_cache=use) for use in (True, False))
        assert cached.shape == (2, 3 + length) and cached.max() < 60
        ask(torch.equal(cached, plain),
            "with a cache generation differs: hand cache[i] to block i and extend it there, with "
            "positions from cache[0].length on; or leave the parameter cache out of forward")
    ask(cached[0, 3:].unique().numel() > 1, "generation repeats one token: not a test")


def test_contract_plan(tmp, model):
    """A rehearsed step keeps the parameters and gradients that there are."""
    rehearse = pytest.importorskip("rehearse").rehearse
    for strategy, size in (("single", 1), ("full_shard", 2)):
        world = World(size=size, local_size=size)
        cfg = resolved(small(tmp, model, strategy=strategy), world, distributed=size > 1)
        device, _ = formulas.kept(train.meta_model(cfg), cfg, world)
        timeline, marks, _ = rehearse(cfg, world)
        where = {name: n for n, name in marks}
        _, parameters, _, gradients, *_ = timeline[where["optimizer"]]
        ask(parameters == device["parameters"], "the plan counts other parameters than there are")
        ask(gradients == pytest.approx(device["gradients"], rel=0.02),
            "in the plan's step the gradients are others than the parameters'")


# -----------------------------------------------------------------------------
# trained: every mode gives the numbers of plain PyTorch

DDP, ZERO2, ZERO3 = (dict(strategy=name) for name in ("ddp", "shard_grad_op", "full_shard"))
HYBRID = dict(strategy="hybrid_shard", shard_group_size=2)
MUON = dict(optimizer="muon")
MODES = {  # name: (ranks, keys)
    "single": (1, {}), "muon": (1, MUON),
    **{f"{keys['strategy']}-{n}": (n, keys) for n, keys in (
        (2, DDP), (2, ZERO2), (2, ZERO3), (3, DDP), (3, ZERO3), (4, ZERO3), (4, HYBRID))},
    **{f"muon-{keys['strategy']}-{n}": (n, dict(keys, **MUON)) for n, keys in (
        (2, DDP), (2, ZERO3), (3, DDP), (3, ZERO3), (4, HYBRID))},
    "full-checkpointing": (3, dict(ZERO3, activation_checkpointing="full",
                                   activation_offload=True, wrap_min_params=1000)),
    "selective-checkpointing": (2, dict(ZERO3, activation_checkpointing="selective")),
    "hybrid-selective": (4, dict(HYBRID, activation_checkpointing="selective", grad_sync="last")),
    "compiled-ddp": (2, dict(DDP, compile=True, activation_checkpointing="full")),
    "compiled-full_shard": (2, dict(ZERO3, compile=True, cpu_offload=0.5, prefetch_blocks=1)),
}


def case_half(tmp, model):
    """The loss of one batch under FSDP's bf16 policy."""
    world = setup("cpu", "auto")
    cfg = small(tmp, model, strategy="full_shard", dtype="bfloat16")
    wrapped, _, _ = train.build(resolved(cfg, world), world)
    loss = wrapped(*tokens())[1]
    loss.backward()
    return loss.item()


def case_resume(tmp, model, **keys):
    """Losses of 4 steps; of 2 and 2 from a full checkpoint; of 2 and 2 from a sharded one. At 3
    ranks, of the later 2 from what 2 ranks left. With dropout if there is one."""
    keys.update(model=model, eval_interval=4, max_iters=4, gradient_accumulation_steps=6)
    if "dropout" in {f.name for f in fields(model_file(model).ModelConfig)}:
        keys.update(dropout=0.1)
    world, runs = torch.distributed.get_world_size(), []
    if world == 2:
        runs.append(run_training(tmp, f"{model}-resume-whole", **keys))
    for kind in ("full", "sharded"):
        name, more = f"{model}-resume-{kind}", dict(keys, checkpoint=kind)
        if world == 2:
            run_training(tmp, name, **dict(more, max_iters=2, eval_interval=1))
            if torch.distributed.get_rank() == 0:
                shutil.copytree(os.path.join(tmp, name), os.path.join(tmp, name + "-3"))
            torch.distributed.barrier()
        else:
            name += "-3"
        runs.append(run_training(tmp, name, init_from="resume", **more))
    return [[row["loss"] for row in run] for run in runs]


@pytest.fixture(scope="session")
def ranks(tmp, request):
    """ranks(world) -> the results of all models' cases at that world size, run once."""
    @functools.cache
    def get(world):
        cases = {}
        for model in models_of(request.config, trained=True):
            own = dict(tmp=tmp, model=model)
            for name, (size, keys) in MODES.items():
                if size == world:
                    run = dict(own, name=f"{model}-{name}", **keys, **sizes(world))
                    # whole, evaluation too takes long; compiled-full_shard has it
                    case = run_compiled if name == "compiled-ddp" else run_training
                    cases[f"{model}-{name}"] = case, run
            if world < 4:
                cases[f"{model}-resume"] = case_resume, dict(own, **KEYS)
            if world == 2:
                cases[f"{model}-half"] = case_half, own
        if world == 3:
            get(2)  # which leaves the checkpoints
        return on_ranks(world, cases)
    return get


@functools.cache
def plain(tmp, model, world):
    """(losses, norms, weights, where a weight has a gradient) of plain PyTorch: a micro-batch after
    the other, in one process, with AdamW of its own."""
    cfg = small(tmp, model, strategy="single", **sizes(world))
    ours, batches = plain_model(cfg).train(), Batches(cfg, World())
    groups = [{"params": [p for p in ours.parameters() if p.dim() > 1], "weight_decay": 0.1},
              {"params": [p for p in ours.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=False, fused=False)
    losses, norms = [], []
    largest = {name: torch.zeros_like(p) for name, p in ours.named_parameters()}  # gradients
    for step in range(cfg.max_iters):
        total = 0.0
        for micro in range(cfg.gradient_accumulation_steps):
            loss = ours(*batches.train(step, micro))[1] / cfg.gradient_accumulation_steps
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(ours.parameters(), cfg.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, cfg)
        optimizer.step()
        for name, p in ours.named_parameters():
            largest[name] = torch.maximum(largest[name], p.grad.abs())
        optimizer.zero_grad()
        losses.append(total)
        norms.append(norm.item())
    # a gradient that is zero but for rounding, such as the bias of the keys: AdamW divides that
    # noise by its own size, and what comes of it is another in every mode
    noise = 1e-6 * max(size.max() for size in largest.values())
    counts = {name: size > noise for name, size in largest.items()}
    return losses, norms, dict(ours.state_dict()), counts


@pytest.fixture(scope="session")
def muon(tmp):
    """muon(model, world) -> (rows, weights) of what Muon does at `world` ranks, in one process;
    test_optimizer.py has its proof."""
    @functools.cache
    def get(model, world):
        name = f"{model}-muon-{world}"
        rows = run_training(tmp, name, model=model, **MUON, **sizes(world))
        return rows, read_ckpt(os.path.join(tmp, name))["model"]
    return get


@pytest.mark.parametrize("name", [name for name in MODES if name != "muon"])
def test_contract_modes(tmp, model, ranks, muon, name):
    """The same losses, norms and weights as plain PyTorch's; with Muon, as one process's."""
    world, _ = MODES[name]
    losses, norms, weights, counts = plain(tmp, model, world)
    if name.startswith("muon"):
        rows, weights = muon(model, world)
        losses, norms = ([row[key] for row in rows] for key in ("loss", "grad_norm"))
    if world == 1:
        rows = run_training(tmp, f"{model}-single", model=model, **sizes(1))
    else:
        rows = ran(ranks(world), f"{model}-{name}")[0]
    remedy = "keep state, random numbers and collectives out of forward"
    for key, expected, limit in (("loss", losses, 1e-6), ("grad_norm", norms, 1e-5)):
        got = [row[key] for row in rows]
        ask(got == pytest.approx(expected, rel=limit), f"{key} differs in {name}: {remedy}")
    ours = read_ckpt(os.path.join(tmp, f"{model}-{name}"))["model"]
    assert ours.keys() == weights.keys()
    for key in ours:
        where = counts.get(key, torch.tensor(True))
        off = ((ours[key] - weights[key]) * where).norm() / weights[key].norm().clamp(min=1e-3)
        ask(off <= 1e-5, f"{key} differs by {off:.1e} in {name}: {remedy}")


def test_contract_half(tmp, model, ranks):
    """Under FSDP's bf16 policy the loss is that of fp32, nearly."""
    with torch.no_grad():
        expected = plain_model(small(tmp, model))(*tokens())[1].item()
    for loss in ran(ranks(2), f"{model}-half"):
        ask(loss == pytest.approx(expected, rel=0.02),
            "FSDP casts a block's arguments to bf16: compute angles and the like inside the block")


def test_contract_resume(tmp, model, ranks):
    """Bitwise at the same world size, and to 1e-5 at another, from both kinds of checkpoint."""
    remedy = "keep all state in parameters; nothing else is saved"
    whole, *parts = ran(ranks(2), f"{model}-resume")[0]
    assert len(whole) == 4
    for losses in parts:
        ask(losses == whole, f"after a resume the losses are others: {remedy}")
    for losses in ran(ranks(3), f"{model}-resume")[0]:
        ask(losses == pytest.approx(whole, rel=1e-5), f"not at 3 ranks what was at 2: {remedy}")
    checkpoint.main(["full", os.path.join(tmp, f"{model}-resume-sharded")])
    expected, *others = (read_ckpt(os.path.join(tmp, f"{model}-resume-{kind}"))
                         for kind in ("whole", "full", "sharded"))
    for other in others:
        for name, tensor in expected["model"].items():
            ask(torch.equal(other["model"][name], tensor), f"{name} is lost: {remedy}")
        for i, state in expected["optimizer"]["state"].items():
            for kind, tensor in state.items():
                assert torch.equal(other["optimizer"]["state"][i][kind], tensor)


# -----------------------------------------------------------------------------
# the contract's own proof: a small file without the optional parts, and copies of moe.py, each with
# one fault, whose failure says what to change

MINIMAL = """
import torch
from dataclasses import dataclass
from torch.nn import functional as F

@dataclass
class ModelConfig:
    block_size: int = 16
    vocab_size: int = 67
    n_layer: int = 3

class Model(torch.nn.Module):  # looks at one token, through a few matrices
    def __init__(self, config):
        super().__init__()
        self.config, sizes = config, [config.vocab_size] * 2
        self.table = torch.nn.Embedding(*sizes)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(*sizes) for _ in range(config.n_layer))

    def forward(self, idx, targets=None):
        x = self.table(idx)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        if targets is None:
            return x[:, [-1]], None
        return x, F.cross_entropy(x.float().flatten(0, 1), targets.flatten(), ignore_index=-1)

    def initial_value(self, name, shape, seed):
        return torch.arange(shape.numel()).add(sum(map(ord, name)) + seed).sin().view(shape)
"""
NORMAL = "return normal(shape, 0.02, (seed, name))"
LAST = "ModelConfig, Model = MoEConfig, MoE"
LOSS = "loss + self.config.balance * unbalanced / self.config.n_layer"
EXPERTS = "self.mlp = Experts(config)"
HEAD = "logits, loss = self.head_loss(x, targets)"
COMPUTE = "            y = F.linear"
BRANCH = f"            if not weights[..., e].any():\n                continue\n{COMPUTE}"
REVERSED = """        layers = reversed(self.transformer.items())
        self.transformer = nn.ModuleDict(dict(layers))
"""
FAULTS = {  # name: (which test, its sentence, {what moe.py has: what its copy has instead})
    "sizes": ("keys", "add to ModelConfig, as other files read it: ", {
        LAST: "@dataclass\nclass ModelConfig:\n    vocab_size: int = 9\n\n\nModel = MoE"}),
    "collision": ("keys", "needs another name: every run has a key momentum", {
        "n_expert: int = 4": "momentum: int = 4"}),
    "type": ("keys", "ModelConfig.n_expert, a <class 'list'>, must be an int, float", {
        "n_expert: int = 4": "n_expert: list = None"}),
    "config": ("keys", "set self.config = config", {
        LAST: f"{LAST}\nMoE.config = property(lambda self: None, lambda *_: None)"}),
    "buffer": ("parameters", r"compute transformer\.h\.0\.angles, .* in forward", {
        EXPERTS: f"{EXPERTS}\n        self.register_buffer('angles', torch.empty(2))"}),
    "no blocks": ("parameters", "Model.blocks must be the layers", {
        "range(config.n_layer)": "[]"}),
    "blocks": ("parameters", r"take transformer\.h\.0, .* out of Model\.blocks", {
        "ModuleList([Block(config) for": "ModuleList([nn.Identity() for"}),
    "scalar": ("parameters", r"make transformer\.h\.0\.bias a vector of one number", {
        EXPERTS: f"{EXPERTS}\n        self.bias = nn.Parameter(torch.empty(()))"}),
    "device": ("parameters", r"h\.0\.mlp\.c_fc must be made where torch\.device says", {
        "torch.empty(E, 2 * C, C)": "torch.empty(E, 2 * C, C, device='cpu')"}),
    "other random numbers": ("parameters", "from seed and name: use normal", {
        NORMAL: "return torch.randn(shape)"}),
    "no seed": ("parameters", "from its seed", {NORMAL: "return normal(shape, 0.02, name)"}),
    "no name": ("parameters", "start equal", {NORMAL: "return normal(shape, 0.02, (seed,))"}),
    "shape": ("parameters", r"must return \(4, 60, 30\) in float32", {
        NORMAL: "return torch.ones(5)"}),
    "nan": ("parameters", "must be finite", {NORMAL: "return torch.full(shape, math.nan)"}),
    "no value": ("parameters", "c_fc has no initial value: add it to initial_value", {
        NORMAL: "pass"}),
    "hooks": ("forward", "call each block once", {"block(x, None": "block.forward(x, None"}),
    "logits": ("forward", "forward returns logits", {
        "return logits, loss": "return logits.flatten(0, 1), loss"}),
    "loss": ("forward", "forward returns the mean loss", {LOSS: f"({LOSS}) * torch.ones(2)"}),
    "last": ("forward", "of the last position", {
        "self.lm_head(x[:, [-1], :])": "self.lm_head(x)"}),
    "padding": ("forward", "targets of -1 do not count: use model.cross_entropy", {
        HEAD: "logits = self.lm_head(x)\n        "
              "loss = F.cross_entropy(logits.transpose(1, 2), targets)"}),
    "bf16": ("forward", "compute the loss in float32", {LOSS: f"({LOSS}).to(logits.dtype)"}),
    "meta": ("forward", "forward must run on the meta device", {COMPUTE: BRANCH}),
    "chunks": ("loss_chunks", "let forward call self.head_loss", {
        HEAD: "logits = self.lm_head(x)\n        "
              "loss = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-1)"}),
    "idle": ("gradients", r"mlp\.c_fc\.\d has no gradient from a batch of one", {
        "nn.Parameter(torch.empty(E, 2 * C, C))":
        "nn.ParameterList([torch.empty(2 * C, C) for _ in range(E)])", COMPUTE: BRANCH}),
    "order": ("registration", "register modules in the order in which forward uses them", {
        "        self.transformer.h =": REVERSED + "        self.transformer.h ="}),
    "positions": ("generation", "with a cache generation differs", {
        "past = 0 if cache is None else cache[0].length": "past = 0"}),
}


@pytest.fixture
def copy(models, request):
    """copy(name, code): --model=moe_<name> is a file with this code. Not where yours is tested."""
    if request.config.getoption("--model"):
        pytest.skip("the contract's own proof")

    def make(name, code):
        (models / f"moe_{name}.py").write_text(code)
        return f"moe_{name}"
    return make


@pytest.mark.parametrize("name", FAULTS)
def test_contract_says_what_to_change(tmp, copy, name):
    test, sentence, changes = FAULTS[name]
    with open(os.path.join(HERE, "tests", "moe.py")) as f:
        code = f.read()
    for before, after in changes.items():
        assert before in code
        code = code.replace(before, after)
    faulty = copy(name.replace(" ", "_"), code)
    with pytest.raises(BaseException, match=sentence) as e:
        globals()[f"test_contract_{test}"](tmp, faulty)
    assert "\n" not in str(e.value)


ON_RANKS = {  # name: (its sentence, what moe.py has, what its copy has instead)
    "outside": ("use a block's parameters in its own forward only", LOSS,
                f"{LOSS} + 0 * self.blocks[0].ln_1.weight.sum()"),
    "state": ("keep state, random numbers and collectives out of forward", LOSS,
              f"({LOSS}) * (1 + len(self.calls) / 99)\n\n    calls = property(lambda self: self."
              "__dict__.setdefault('_calls', []).append(1) or self._calls)"),
}


def test_contract_says_what_to_change_when_ranks_differ(tmp, copy):
    with open(os.path.join(HERE, "tests", "moe.py")) as f:
        code = f.read()
    cases = {}
    for name, (_, before, after) in ON_RANKS.items():
        assert before in code
        model = copy(name, code.replace(before, after))
        run = dict(tmp=tmp, model=model, name=f"{model}-full_shard-2", **ZERO3, **sizes(2))
        cases[run["name"]] = run_training, run
    results = on_ranks(2, cases)
    for name, (sentence, _, _) in ON_RANKS.items():
        with pytest.raises(BaseException, match=sentence) as e:
            test_contract_modes(tmp, f"moe_{name}", lambda world: results, None, "full_shard-2")
        assert "\n" not in str(e.value)


def test_contract_holds_without_the_optional_parts(tmp, copy):
    minimal = copy("minimal", MINIMAL)
    for test in ("keys", "parameters", "forward", "gradients", "registration", "generation"):
        globals()[f"test_contract_{test}"](tmp, minimal)
    with pytest.raises(BaseException, match="no head_loss"):  # skipped
        test_contract_loss_chunks(tmp, minimal)


# -----------------------------------------------------------------------------
# what a run says of a file whose forward looks at values, and leaves experts without tokens out

# more experts than a micro-batch has tokens
MANY = dict(n_expert=20, n_active=1, batch_size=1, n_layer=2, max_iters=3, eval_interval=3)
IDLE = {**{strategy: dict(strategy=strategy, shard_group_size=int(strategy == "hybrid_shard"))
           for strategy in ("ddp", "shard_grad_op", "full_shard", "hybrid_shard")},
        "compiled": dict(strategy="full_shard", compile=True, activation_checkpointing="full")}


@pytest.fixture
def idle(copy):
    with open(os.path.join(HERE, "tests", "moe.py")) as f:
        code = f.read()
    for before, after in FAULTS["idle"][2].items():
        code = code.replace(before, after)
    return copy("idle", code)


def test_contract_run_refuses_gradients_that_not_all_ranks_have(tmp, idle):
    """One line on every rank, before the first backward; later, gloo would abort or NCCL hang."""
    keys = dict(tmp=tmp, model=idle, **MANY)
    results = on_ranks(2, {name: (run_training, dict(keys, name=f"idle-{name}", **more))
                           for name, more in IDLE.items()}, timeout=100)
    said = (r"transformer\.h\.\d\.mlp\.c_\w+\.\d+ gets a gradient on [01] of 2 ranks; let "
            r"the model add 0 \* its output, or --freeze it")
    for name in IDLE:
        for rank in results[name]:
            assert re.fullmatch(said, rank["error"]), name


def case_idle_later(**run):
    """As if all ranks had the same gradients in the first batch only."""
    with patch.object(train, "require_gradients"):
        return run_training(**run)


def test_contract_run_fills_in_zeros_where_a_later_batch_has_no_gradient(tmp, idle):
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("from torch 2.13 on")
    run = dict(tmp=tmp, model=idle, name="idle-later", **MANY)
    expected = [row["loss"] for row in run_training(**run)]
    cases = {name: (case_idle_later, dict(run, **IDLE[name], name=f"idle-{name}"))
             for name in ("shard_grad_op", "full_shard", "hybrid_shard")}
    results = on_ranks(2, cases)
    for name in cases:
        for rows in ran(results, name):
            assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-5)


def test_contract_run_without_flops_says_so_once(tmp, idle, capsys, monkeypatch):
    monkeypatch.setattr(metrics, "peak_flops", lambda device: 1e12)  # else nobody counts
    rows = run_training(tmp, "idle-single", model=idle, **MANY)
    assert [row["mfu"] for row in rows] == [None] * 3
    said = re.findall("^mfu n/a: the model does not run .*", capsys.readouterr().out, re.M)
    assert len(said) == 1 and "Tensor.item() cannot be called on meta tensors" in said[0]
