"""
The contract of a model file, as tests of your file; docs/model_file.md explains it.

    python -m pytest -q tests/test_contract.py --model=NAME            # the file alone
    python -m pytest -q tests/test_contract.py --model=NAME --ranks    # and trained in every mode
    python -m pytest -q tests/test_contract.py --model=NAME --ranks --optimizer=OTHER  # by your own
    python -m pytest -q tests/test_contract.py                         # model.py alone

NAME is NAME.py, as train.py takes it. On two free CPU cores the first takes about 5 seconds, and
the second up to a minute, on 1 to 4 processes. Sizes are those of TINY and OTHERS in
tests/training.py, as far as your keys have these names; for others say --keys=width=30.
"""

import functools
import inspect
import os
import random
from dataclasses import fields, replace

import harness
import numpy as np
import pytest
import torch
import torch.distributed as dist
import training
from harness import values
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import plain_model, read_ckpt, run_training

import configurator
import fsdp
import sample
import train
from checkpoint import not_saved
from configurator import load_config, model_file
from model import cross_entropy
from ranks import World

KEYS = dict(n_layer=2, max_iters=3, eval_interval=3)  # and those of --keys
USUAL = ["gpt2"]  # without --model; another file of tests may have its own
X, Y = torch.randint(67, (2, 3, 16), generator=torch.Generator().manual_seed(0))  # tokens, targets
SOME = torch.arange(16) < torch.tensor([[4], [12], [9]])  # not as many in each row
ALL = torch.ones_like(SOME)
Y_SOME = Y.where(SOME, -1)


def pytest_generate_tests(metafunc):
    option = metafunc.config.getoption
    KEYS.update(key.split("=", 1) for key in option("--keys") or [])
    if option("--optimizer"):
        KEYS["optimizer"] = option("--optimizer")[-1]
    if "model" in metafunc.fixturenames:
        models = option("--model") or metafunc.module.USUAL
        trains = metafunc.function in TRAIN
        # test_fsdp.py trains gpt2.
        if trains and (option("--model") or models == ["gpt2"]) and not option("--ranks"):
            models = []
        metafunc.parametrize("model", models)


def small(tmp, model, **overrides):
    """The config of a small run, by way of flags, as a user's."""
    keys = {**KEYS, "model": model, "vocab_size": 67, **overrides}
    return load_config(training.arguments(tmp, "out", **keys))


def is_causal(cfg):
    """A left-to-right language model, unless its class has causal = False."""
    return getattr(model_file(cfg.model).Model, "causal", True)


@torch.no_grad()
def awake(cfg):
    """The plain model a little away from its first values, of which some may be zeros."""
    model = plain_model(cfg)
    torch.manual_seed(0)
    for p in model.parameters():
        p.add_(torch.randn_like(p), alpha=0.05)
    return model


def close(a, b, limit=1e-4):
    return (a - b).norm() <= limit * b.norm()


# ---------- the file alone ----------------------------------------------------


def keys(cfg):
    """A flag sets the run's key of that name, and not the model's."""
    taken = [f.name for f in fields(cfg.sizes) if hasattr(configurator.Keys, f.name)]
    assert not taken, "rename these fields of ModelConfig: every run has keys of their names"


def parameters(cfg):
    """They have first values from seed and name alone; buffers are constants."""
    model = train.meta_model(cfg)
    for name, buffer in model.named_buffers():
        assert not buffer.is_meta, f"the buffer {name} gets no values: use device='cpu'"
        assert name not in model.state_dict(), f"the buffer {name}: use persistent=False"
    drawn_by = {}  # {name: value} of what the seed decides
    for name, p in model.named_parameters():
        drawn = []
        for global_seed, seed in ((1, 5), (2, 5), (2, 6)):
            torch.manual_seed(global_seed)
            drawn.append(model.initial_value(name, p.shape, seed)[:])
        value, again, other = drawn
        assert value.shape == p.shape and value.dtype == p.dtype == torch.float32, name
        assert torch.equal(value, again), f"draw initial_value({name}) from seed and name alone"
        if not torch.equal(value, other):  # a table of decays, say, needs no seed
            twins = [n for n, v in drawn_by.items() if torch.equal(v, value)]
            assert not twins, f"{name} begins as {twins}: draw initial_value from the name too"
            drawn_by[name] = value
    assert drawn_by, "draw initial_value from its seed: no parameter depends on it"
    for name in not_saved(model):
        assert not model.get_parameter(name).requires_grad, f"{name} is not saved: freeze it"


def order(cfg):
    """Each forward calls each block once, and units in the order in which they are registered."""
    model = plain_model(cfg).train()
    names = {module: name for name, module in model.named_modules()}
    called = []
    for module in names:
        module.register_forward_pre_hook(lambda module, args: called.append(names[module]))
    for _ in range(8):
        model(X, Y)
    blocks = [names[block] for block in model.blocks]
    used = [name for name in called if name in blocks]
    assert used == 8 * blocks, "call each block once, as block(x), in the order of Model.blocks"
    for least in (0, 1000):
        units = [names[unit] for unit in fsdp.find_units(model, model.blocks, least)]
        # What is called between the blocks, again and again, has no place in their order.
        used = [name for name in called if name in units and called.count(name) == 8]
        used = list(dict.fromkeys(used))
        registered = [name for name in names.values() if name in used]
        assert used == registered, "register modules in the order in which forward uses them"


@torch.no_grad()
def loss(cfg):
    """In evaluation the mean cross-entropy of the targets that count; in training a bit more."""
    model = awake(cfg)
    torch.manual_seed(0)
    logits, alone = model(X, Y_SOME)
    assert logits is None or logits.shape == (3, 16, 67)
    assert alone.shape == () and alone.dtype == torch.float32
    if not is_causal(cfg):
        return
    last, nothing = model(X)
    assert last.shape == (3, 1, 67) and nothing is None, "logits (B, 1, V) of the last position"
    expected = by_prefixes(model, X)
    assert logits is None or close(logits, expected), "the logits of fewer tokens are others"
    assert close(alone, cross_entropy(expected, Y_SOME)), (
        "the loss must be the mean over targets that are not -1; they are shifted already")
    model.train()  # a second token that is predicted may double it
    assert 0.8 * alone < model(X, Y_SOME)[1].sum() < 2 * alone, "in training it must be a mean too"


@torch.no_grad()
def by_prefixes(model, x):
    """Logits (B, T, V), each from a forward of the tokens up to its position, without targets."""
    return torch.cat([model(x[:, :t])[0] for t in range(1, x.size(1) + 1)], dim=1)


@torch.no_grad()
def state(cfg):
    """Forward keeps none, and draws random numbers from torch's global generator alone."""
    if hasattr(cfg.sizes, "dropout"):
        cfg = replace(cfg, sizes=replace(cfg.sizes, dropout=0.5))
    model = awake(cfg).train()

    def loss(seed_of_others):
        random.seed(seed_of_others)
        np.random.seed(seed_of_others)
        torch.manual_seed(1)
        return model(X, Y)[1].sum().item()

    losses = {loss(seed) for seed in range(8)}
    before, after = (
        dict([*each.named_parameters(), *each.named_buffers()]) for each in (awake(cfg), model))
    changed = [name for name in after if not torch.equal(after[name], before.get(name, X))]
    assert not changed, "forward makes or changes these: nothing shards or saves that"
    assert len(losses) == 1, "keep no state in forward, and draw random numbers from torch alone"
    model.eval()
    assert loss(0) == loss(1), "draw random numbers from torch in evaluation too"
    if is_causal(cfg):
        again = [model(X, Y)[1] for _ in range(2)]
        assert torch.equal(*again), "draw no random numbers unless self.training"


@torch.no_grad()
def causality(cfg):
    """In eval mode a position sees its own row, up to itself."""
    model = awake(cfg)

    def answer(kept, counted):
        """With other tokens where nothing is kept, of the targets that are counted."""
        torch.manual_seed(0)
        logits, loss = model(X.where(kept, 66 - X), Y.where(counted, -1))
        return logits[counted] if is_causal(cfg) and logits is not None else loss

    for row in torch.eye(3).bool()[..., None].expand(3, 3, 16):  # (3, 16), one row of it True
        assert close(answer(row, row), answer(ALL, row), 1e-6), (
            "forward mixes the rows of a batch, or the loss counts rows whose targets are all -1")
    if is_causal(cfg):
        same = close(answer(SOME, SOME), answer(ALL, SOME), 1e-6)
        assert same, "a position's logits depend on a later token (else say causal = False)"


def gradients(cfg):
    """From tokens that are all one: experts without tokens get a gradient too, as ddp needs it."""
    model = plain_model(cfg).train()
    for token in range(0, 67, 9):
        idx = torch.full((1, cfg.sizes.block_size), token)
        loss_and_gradients(model, model, cfg, idx, idx)


def any_device(cfg):
    """No operation takes tensors of two, but single numbers. Here they are meta and cpu."""
    model = train.meta_model(cfg).to("meta")  # buffers too, which shard and allocate move
    idx = torch.zeros(3, 16, dtype=torch.long, device="meta")
    with OneDevice():
        model(idx, idx)[1].sum().backward()


class OneDevice(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        leaves = filter(torch.is_tensor, tree_leaves((args, kwargs)))
        devices = {t.device for t in leaves if t.dim()}
        assert len(devices) < 2, f"{operation} of tensors on two devices: use device=idx.device"
        return operation(*args, **kwargs or {})


@torch.no_grad()
def generation(cfg):
    """The logits of several tokens, then of one at a time, with a cache and without."""
    model = awake(cfg)
    if "cache" in inspect.signature(model.forward).parameters:
        cache = [sample.KVCache() for _ in model.blocks]
        pieces = [X[:, :3], *X[:, 3:].split(1, dim=1)]
        cached = [model(piece, cache=cache)[0] for piece in pieces]
        same = close(torch.cat(cached, dim=1), by_prefixes(model, X)[:, 2:])
        assert same, "with a cache the logits are others: positions begin at cache[0].length"


CHECKS = (keys, parameters, order, loss, state, causality, gradients, any_device, generation)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_of_the_file(tmp, model, check):
    check(small(tmp, model))


# ---------- built as train.py builds it: the plain model's loss and gradients --

DDP = dict(strategy="ddp")
ZERO3 = dict(strategy="full_shard")
FULL = dict(activation_checkpointing="full")
BUILDS = {
    "single": dict(strategy="single"),
    "ddp": DDP,
    "full_shard": ZERO3,
    "units_by_size": dict(ZERO3, wrap_min_params=1000),
    "full": dict(ZERO3, **FULL),
    "selective": dict(ZERO3, activation_checkpointing="selective"),
    "loss_chunks": dict(strategy="single", loss_chunks=3),
    "autocast": dict(strategy="single", dtype="bfloat16"),
    "bfloat16": dict(ZERO3, dtype="bfloat16"),
}


def loss_and_gradients(model, wrapped, cfg, idx=X, targets=Y_SOME):
    """{what it is: value}."""
    model.zero_grad()
    torch.manual_seed(0)
    found = {"loss": train.forward(wrapped, idx, targets, 1.0, cfg, World()).sum()}
    found["loss"].backward()
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert p.grad is not None, f"{name} has no gradient: add 0 * what it computes"
            found[name] = fsdp.gather_full(p.grad)
    return found


@pytest.mark.parametrize("build", BUILDS)
def test_contract_of_each_build(tmp, model, build):
    """The plain model's loss and gradients; in bf16 nearly its loss."""
    cfg = small(tmp, model, **BUILDS[build])
    plain = awake(cfg).train()
    expected = loss_and_gradients(plain, plain, replace(cfg, dtype="float32"))
    if build == "loss_chunks" and not hasattr(plain, "head_loss"):
        return  # it is optional
    # A group of this process alone: FSDP2's hooks gather and free as on many.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ours = train.meta_model(cfg)
        wrapped, _ = train.build(ours, cfg, World())
        for name, p in ours.named_parameters():
            fsdp.write_full(p, plain.get_parameter(name).detach())
        found = loss_and_gradients(ours, wrapped, cfg)
        with fsdp.inference(wrapped):
            logits, alone = wrapped(X, Y_SOME)
    finally:
        dist.destroy_process_group()

    assert found.keys() == expected.keys()  # else what was tied is not
    assert found["loss"].dtype == torch.float32
    half = cfg.dtype == "bfloat16"
    limit = 0.02 if half else 1e-6
    assert found["loss"].item() == pytest.approx(expected["loss"].item(), rel=limit)
    if half and logits is not None and is_causal(cfg):  # bf16 would round a loss to 1/256
        assert close(alone, cross_entropy(logits, Y_SOME)), "take the loss of logits.float()"
    for name in found:
        error = (found[name] - expected[name]).norm()
        assert half or error <= 1e-6 + 1e-5 * expected[name].norm(), f"{name} is off by {error:.1e}"


def assert_kept(tmp, model):
    """The contract of the file, for other tests."""
    for check in CHECKS:
        check(small(tmp, model))
    for build in BUILDS:
        test_contract_of_each_build(tmp, model, build)


# ---------- with --ranks: trained in every mode, the numbers of plain PyTorch ---

MODES = {  # name: (ranks, keys)
    "single": (1, dict(strategy="single")),
    **{keys["strategy"]: (n, keys) for n, keys in training.WAYS.values()},
    "ddp-3": (3, DDP),
    "full-checkpointing": (3, dict(ZERO3, **FULL, activation_offload=True, wrap_min_params=1000)),
    "compiled-ddp": (2, dict(DDP, **FULL, compile=True)),
    "compiled-full_shard": (2, dict(ZERO3, compile=True, cpu_offload=0.5, prefetch_blocks=1)),
}


@functools.cache
def runs_of(tmp, model, world):
    """The logged steps of a model's runs on so many ranks, as `on_ranks` returns them."""
    own = dict(KEYS, tmp=tmp, model=model)
    cases = {}
    for name, (size, keys) in MODES.items():
        if size == world:
            function = training.run_compiled if "compile" in keys else run_training
            cases[name] = function, dict(own, name=f"{model}-{name}", **keys)

    # 6 steps; and 2, then 2 more, then 2 more on the 3 ranks that go on from what 2 ranks leave.
    if "dropout" in configurator.keys_of(model):
        own.update(dropout=0.1)
    if world == 2:
        cases["whole"] = run_training, dict(own, name=f"{model}-whole", max_iters=6)
    if world == 3:
        runs_of(tmp, model, 2)
    for end in {2: (2, 4), 3: (6,)}.get(world, ()):
        part = dict(own, name=f"{model}-parts", checkpoint="sharded", init_from="auto")
        cases[f"until-{end}"] = run_training, dict(part, max_iters=end)
    return harness.on_ranks(world, cases)


@functools.cache
def expected_of(tmp, model):
    """What plain PyTorch gives, with its AdamW. Of another optimizer: what one process does."""
    *expected, counts = training.plain_training(small(tmp, model, strategy="single"))
    if "optimizer" in KEYS:
        rows = run_training(tmp, f"{model}-alone", model=model, **KEYS)
        expected = [[row[key] for row in rows] for key in ("loss", "grad_norm")]
        expected.append(read_ckpt(os.path.join(tmp, f"{model}-alone"))["model"])
    return *expected, counts


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_contract_modes(tmp, model, mode):
    """The losses, norms and weights that are expected."""
    losses, norms, weights, counts = expected_of(tmp, model)
    rows = values(runs_of(tmp, model, MODES[mode][0]), mode)[0]
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-6)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-5)
    ours = read_ckpt(os.path.join(tmp, f"{model}-{mode}"))["model"]
    assert ours.keys() == weights.keys()
    for name in ours:
        difference = (ours[name] - weights[name]) * counts.get(name, torch.tensor(True))
        error = difference.norm() / weights[name].norm().clamp(min=1e-3)
        assert error <= 2e-5, f"{name} is off by {error:.1e}"


@pytest.mark.slow
def test_contract_resume(tmp, model):
    """Bitwise at the same world size, and to 1e-5 at another: only parameters are saved."""
    whole = [row["loss"] for row in values(runs_of(tmp, model, 2), "whole")[0]]
    parts = [row["loss"] for row in values(runs_of(tmp, model, 3), "until-6")[0]]
    assert parts[:4] == whole[:4]
    assert parts == pytest.approx(whole, rel=1e-5)


TRAIN = test_contract_modes, test_contract_resume
