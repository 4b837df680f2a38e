"""
The contract of a model file, as tests of your file; docs/model_file.md explains it.

    python -m pytest -q tests/test_contract.py --model=NAME            # the file alone
    python -m pytest -q tests/test_contract.py --model=NAME --ranks    # and trained in every mode
    python -m pytest -q tests/test_contract.py --model=NAME --ranks --optimizer=OTHER  # by your own
    python -m pytest -q tests/test_contract.py                         # model.py alone

NAME is NAME.py, as train.py takes it. What a failure says is what to change in the file. On two
free CPU cores the first takes about 5 seconds. The second takes up to a minute: it goes on to train
the file on 1 to 4 processes, if all is well with the file alone. Sizes are those of TINY and
OTHERS in tests/harness.py, as far as your keys have these names; for others say --keys=width=30.
"""

import functools
import inspect
import math
import os
import random
import textwrap
import traceback
from contextlib import contextmanager
from dataclasses import MISSING, fields, replace
from typing import Literal, get_origin

import numpy as np
import pytest
import torch
from harness import (
    WAYS,
    arguments,
    on_ranks,
    plain_model,
    plain_training,
    read_ckpt,
    run_compiled,
    run_training,
    values,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import activations
import configurator
import fsdp
import sample
import train
from configurator import load_config, model_file, resolve
from ranks import World

KEYS = dict(n_layer=2, max_iters=3, eval_interval=3)  # and those of --keys
USUAL = ["gpt2"]  # without --model; another file of tests may have its own
X, Y = torch.randint(67, (2, 3, 16), generator=torch.Generator().manual_seed(0))  # tokens, targets
SOME = torch.arange(16) < torch.tensor([[4], [12], [9]])  # not as many in each row
ALL = torch.ones_like(SOME)
Y_SOME = Y.where(SOME, -1)
WRONG = set()  # models whose file alone has failed


def pytest_generate_tests(metafunc):
    option = metafunc.config.getoption
    KEYS.update(key.split("=", 1) for key in option("--keys") or [])
    if option("--optimizer"):
        KEYS["optimizer"] = option("--optimizer")[-1]
    if "model" in metafunc.fixturenames:
        models = option("--model") or metafunc.module.USUAL
        trains = "sound" in metafunc.fixturenames
        alone = option("--model") or models == ["gpt2"]  # which test_fsdp.py trains in every mode
        if trains and alone and not option("--ranks"):
            models = []
        metafunc.parametrize("model", models)


@pytest.fixture
def sound(model):
    if model in WRONG:
        pytest.skip("it does not train before all is well with the file alone")


def small(tmp, model, **overrides):
    """The config of a small run, by way of flags, as a user's."""
    keys = {**KEYS, "model": model, "vocab_size": 67, **overrides}
    return load_config(arguments(tmp, "out", **keys))


def is_causal(cfg):
    """A left-to-right language model, unless its class has causal = False."""
    return getattr(model_file(cfg.model).Model, "causal", True)


NOT_CAUSAL = "; a model that is no left-to-right language model has causal = False in its class"


def ask(good, sentence):
    """Fail with what to change in the file, and nothing else."""
    if not good:
        raise pytest.fail.Exception(sentence, pytrace=False) from None


@contextmanager
def asked(sentence):
    """The same of an error inside. It ends with the error, and its line in the model file."""
    try:
        yield
    except Exception as e:
        error = textwrap.shorten(f"{type(e).__name__}: {str(e).splitlines()[0]}", 200)
        place = ""
        for call in traceback.extract_tb(e.__traceback__):
            folder, file = os.path.split(call.filename)
            if folder in (configurator.HERE, os.path.join(configurator.HERE, "extras")):
                place = f", {file}:{call.lineno}"
        ask(False, f"{sentence} ({error}{place})")


# ---------- the file alone: one test, which ends with the first mistake --------


def test_contract_of_the_file(tmp, model):
    WRONG.add(model)
    try:
        with asked(f"{model} does not run"):
            keys = {f.name: f for f in fields(model_file(model).ModelConfig)}
            for key in ("block_size", "vocab_size", "n_layer"):
                ask(key in keys, f"add {key} to ModelConfig, as other files read it")
            for key, f in keys.items():
                is_plain = f.type in (int, float, bool, str) or get_origin(f.type) is Literal
                ask(is_plain and f.default is not MISSING, f"ModelConfig.{key}, a {f.type!r}, must "
                    "be an int, float, bool, str or Literal, with a default (and the file without "
                    "from __future__ import annotations)")
                ask(not hasattr(configurator.Keys, key), f"rename ModelConfig.{key}: train.py has "
                    "a key of that name")
            cfg = small(tmp, model)
            for check in CHECKS:
                check(cfg)
            WRONG.remove(model)  # it trains
            recomputation(cfg)
    except SystemExit as e:  # what train.py would say
        ask(False, f"{e} (with the contract's small sizes, and those of --keys)")


def parts(cfg):
    """Blocks that are FSDP's units: they have parameters, and share none."""
    with asked("Model(config) must build, of small sizes (see --keys) and on the meta device: "
               "__init__ decides names and shapes, and reads no values"):
        ours = train.meta_model(cfg)
    is_config = isinstance(ours.config, model_file(cfg.model).ModelConfig)
    ask(is_config, "set self.config = config in Model.__init__")
    with asked("Model.blocks must be an nn.ModuleList, or a property that returns one"):
        layers = list(ours.blocks)
    ask(set(layers) <= set(ours.modules()),
        "Model.blocks must be modules that the model has registered: make it an nn.ModuleList")
    ask(layers, "Model.blocks must be the layers: they are FSDP's units")
    once = len(set(layers)) == len(layers)
    ask(once, "a block stands in Model.blocks twice: make one for each layer")
    home = {}  # {a parameter's name: its block}; what is tied has several names
    for start, module in ours.named_modules(remove_duplicate=False):
        if module in set(layers):
            names = [name for name, _ in module.named_parameters(start, remove_duplicate=False)]
            ask(names, f"take {start} out of Model.blocks: it has no parameters")
            home.update(dict.fromkeys(names, module))
    for first, *others in fsdp.tied_names(ours):
        for name in others:
            same = home.get(name) is home.get(first)
            ask(same, f"{first} and {name} are one parameter in two units, which FSDP gathers one "
                      "at a time: make one for each block, or a module of the model itself that "
                      "is called between the blocks")


def parameters(cfg):
    """On meta, in fp32, no scalars; and a first value for each, from seed and name alone. Buffers
    are constants, which nothing fills or saves."""
    ours = train.meta_model(cfg)
    for name, buffer in ours.named_buffers():
        ask(not buffer.is_meta and name not in ours.state_dict(),
            f"the buffer {name} must be a constant that __init__ computes with device='cpu' and "
            "registers with persistent=False; else nothing gives it values, or saves it")
    drawn_by = {}  # {name: value} of what the seed decides
    for name, p in ours.named_parameters():
        ask(p.is_meta, f"{name} must be made where torch.device says, so by no .to() or cpu()")
        kind = str(p.dtype).removeprefix("torch.")
        ask(p.dtype == torch.float32,
            f"{name} must be in float32, not {kind}: the key dtype says what a run computes in, "
            "and a complex number is two parameters")
        ask(p.dim(), f"make {name} a vector of one number: FSDP2 shards no scalar")
        drawn = []
        for global_seed, seed in ((1, 5), (2, 5), (2, 6)):
            torch.manual_seed(global_seed)
            with asked(f"initial_value must know {name}"):
                value = ours.initial_value(name, p.shape, seed)
                # What draws when it is sliced may be model.normal, or a class of the file's own.
                is_whole = value is None or torch.is_tensor(value)
                drawn.append(value if is_whole else value[:])
        value, again, other = drawn
        right = isinstance(value, torch.Tensor) and value.shape == p.shape
        ask(right and value.dtype == torch.float32 and value.device.type == "cpu",
            f"initial_value({name}) must return {tuple(p.shape)} in float32 on the CPU")
        ask(value.isfinite().all(), f"initial_value({name}) must be finite")
        ask(torch.equal(value, again), f"draw initial_value({name}) from seed and name: use normal")
        if not torch.equal(value, other):  # a table of decays, say, needs no seed
            twin = next((n for n, v in drawn_by.items() if torch.equal(v, value)), None)
            ask(not twin, f"{name} and {twin} start equal: draw initial_value from the name too")
            drawn_by[name] = value
    ask(drawn_by, "draw initial_value from its seed: no parameter depends on it")


def forward(cfg):
    """What it takes and returns, in training."""
    ours = plain_model(cfg).train()
    with asked("forward(idx, targets) fails on token ids (B, T), and as many targets"):
        logits, loss = pair(ours(X, Y))
    with asked(f"forward must take any B, and any T up to block_size{NOT_CAUSAL}"):
        T = 5 if is_causal(cfg) else cfg.sizes.block_size
        ours(X[:1, :T], Y[:1, :T].contiguous())
    right = logits is None or logits.shape == (3, 16, 67)
    ask(right, "with targets, its second argument, forward returns logits (B, T, V), or None")
    right = torch.is_tensor(loss) and loss.shape == () and loss.dtype == torch.float32
    ask(right, "with targets forward returns the mean loss, one number in float32")
    ask(loss.isfinite(), f"forward returns a loss of {loss:.4f}: does it divide by 0, or attend to "
                         "no position at all?")
    if is_causal(cfg):
        with asked(f"forward(idx) fails, which sample.py calls{NOT_CAUSAL}"):
            logits, loss = pair(ours(X))
        right = torch.is_tensor(logits) and logits.shape == (3, 1, 67) and loss is None
        ask(right, "without targets forward returns the logits of the last position, (B, 1, V), "
                   f"and None{NOT_CAUSAL}")


def pair(answer):
    is_pair = isinstance(answer, tuple) and len(answer) == 2
    ask(is_pair, "forward must return a pair, (logits, loss)")
    return answer


def backward(cfg):
    """After it there are gradients, and the parameters that there were."""
    ours = plain_model(cfg).train()
    before = dict(plain_model(cfg).named_parameters())
    loss = ours(X, Y)[1]
    for name, p in ours.named_parameters():
        same = name in before and torch.equal(p, before[name])
        ask(same, f"make {name} in Model.__init__, and leave it alone in forward: what forward "
                  "makes or writes is not sharded, trained or saved")
    with asked("change nothing in place that backward needs"):
        loss.backward()
    for name, p in ours.named_parameters():
        finite = p.grad is None or p.grad.isfinite().all()
        ask(finite, f"the gradient of {name} is not finite: does forward take a root or a norm of "
                    "0, or divide by it?")
    cfg = resolve(cfg, World(), distributed=False)
    wrapped, _ = train.build(train.meta_model(cfg), cfg, World())
    with asked("make tensors in forward, or parameters: those that __init__ makes get no values"):
        wrapped(X, Y)


def blocks(cfg):
    """Their order in every forward, and tensors for FSDP2's hooks."""
    ours = plain_model(cfg).train()
    called = []

    def hook(block, args, output):
        called.append(block)
        ask(any(map(torch.is_tensor, tree_leaves(output))),
            "a block must return tensors, or a tuple or dict of them: FSDP2 finds none in "
            f"{type(output).__name__}")

    for block in ours.blocks:
        block.register_forward_hook(hook)
    for _ in range(8):
        ours(X, Y)
    ask(called == 8 * list(ours.blocks),
        "call each block once in every forward, as block(x), not block.forward(x), in their order; "
        "what repeats or is left out does so inside a block")


@torch.no_grad()
def units(cfg):
    """Outside of a unit's own forward its parameters are not there."""
    model = plain_model(cfg)
    chosen = {*model.blocks, *fsdp.find_units(model, model.blocks, 1000)}
    for name, module in model.named_modules():
        if module in chosen:
            ours = plain_model(cfg).train()
            free(ours.get_submodule(name))
            ask(ours(X, Y)[1].isfinite(),
                f"use the parameters of {name} in its own forward only: FSDP gathers them for "
                "that, as it is a block or, with wrap_min_params, a unit too; return from there "
                "what needs them, and tie a head by self.lm_head.weight = self.wte.weight")


def free(unit):
    """Make its parameters NaN, but for its own forward."""
    whole = [p.clone() for p in unit.parameters()]
    nothing = [p * math.nan for p in whole]

    @torch.no_grad()
    def fill(values):
        for p, value in zip(unit.parameters(), values):
            p.copy_(value)

    unit.register_forward_pre_hook(lambda *_: fill(whole), prepend=True)
    unit.register_forward_hook(lambda *_: fill(nothing))
    fill(nothing)


@torch.no_grad()
def awake(cfg):
    """The model a little away from its first values, of which some may be zeros."""
    model = plain_model(cfg)
    torch.manual_seed(0)
    for p in model.parameters():
        p.add_(torch.randn_like(p), alpha=0.05)
    return model


def random_numbers(cfg):
    """From torch's global generator, which training seeds, and from nowhere else."""
    if hasattr(cfg.sizes, "dropout"):
        cfg = replace(cfg, sizes=replace(cfg.sizes, dropout=0.5))
    ours = awake(cfg).train()

    def loss(seed_of_others):
        random.seed(seed_of_others)
        np.random.seed(seed_of_others)
        torch.manual_seed(1)
        return ours(X, Y)[1].item()

    same = len({loss(seed) for seed in range(8)}) == 1
    ask(same, "forward must keep no state, and draw random numbers from torch's global generator "
              "alone, not from Python's random or NumPy's, which training does not seed: a second "
              "call with the same batch gives another loss")
    ours.eval()
    same = loss(0) == loss(1)
    ask(same, "draw random numbers from torch in eval mode too, where evaluation seeds it")
    if is_causal(cfg):
        same = ours(X, Y)[1].item() == ours(X, Y)[1].item()
        ask(same, "draw no random numbers in eval mode: F.dropout needs training=self.training"
                  f"{NOT_CAUSAL}")


@torch.no_grad()
def who_sees_whom(cfg):
    """In eval mode a position sees its own row, up to itself."""
    ours = awake(cfg)

    def answer(kept, counted):
        """With other tokens where nothing is kept, of the targets that are counted."""
        torch.manual_seed(0)
        logits, loss = ours(X.where(kept, 66 - X), Y.where(counted, -1))
        return logits[counted] if is_causal(cfg) and logits is not None else loss

    with asked("targets of -1 do not count: use model.cross_entropy"):
        answer(ALL, SOME)
    for i in range(3):
        row = torch.zeros_like(ALL)
        row[i] = True
        ask(close(answer(row, row), answer(ALL, row), 1e-6),
            "forward mixes the rows of a batch: leave dimension 0 alone (batch_first=True in "
            "nn.LSTM and nn.MultiheadAttention, no mean over it, LayerNorm for BatchNorm), and let "
            "the loss count no row whose targets are all -1")
    if is_causal(cfg):
        ask(close(answer(SOME, SOME), answer(ALL, SOME), 1e-6),
            "a position's logits must depend on no later token: mask what comes later, and pad "
            f"convolutions on the left{NOT_CAUSAL}")


@torch.no_grad()
def by_prefixes(model, x):
    """Logits (B, T, V), each from a forward of the tokens up to its position, without targets."""
    return torch.cat([model(x[:, :t])[0] for t in range(1, x.size(1) + 1)], dim=1)


def close(a, b, limit=1e-4):
    error = (a - b).norm()
    return error <= limit * b.norm()


def each_loss(logits, y):
    """The cross-entropy of the targets that are not -1, one number each, in fp32."""
    chances = logits.float().log_softmax(dim=-1)
    counts = y != -1
    return -chances[counts].gather(1, y[counts][:, None])


@torch.no_grad()
def loss_alone(cfg):
    """In eval mode: the mean cross-entropy of the targets that count."""
    if not is_causal(cfg):
        return
    ours = awake(cfg)
    logits, loss = ours(X, Y_SOME)
    expected = by_prefixes(ours, X)
    ask(logits is None or close(logits, expected),
        "without targets, and of fewer tokens, the logits are others")
    mean = each_loss(expected, Y_SOME).mean()
    ask(close(loss, mean),
        "in eval mode the loss must be the mean cross-entropy of the targets that are not -1, "
        f"here {mean:.4f}, not {loss:.4f}: use model.cross_entropy, with all targets as they come "
        "(they are shifted already), and add what is for training only if self.training")


BF16 = (
    "let a mask or table that it makes have the type of what it meets, by .type_as(x) or "
    "dtype=x.dtype; compute in x.float() what bf16 has no operation for")


@torch.no_grad()
def loss_in_bf16(cfg):
    """As FSDP2 has it: bf16 are the parameters, and the floating-point arguments of a block; not
    the buffers."""
    ours = awake(cfg)
    for p in ours.parameters():
        p.data = p.bfloat16()

    def to_bf16(t):
        return t.bfloat16() if t.is_floating_point() else t

    def cast(block, args, kwargs):
        return tree_map_only(torch.Tensor, to_bf16, (args, kwargs))

    for block in ours.blocks:
        block.register_forward_pre_hook(cast, with_kwargs=True)
    # One target at a time, unless the loss may be another than that of the logits.
    for t in range(16) if is_causal(cfg) else [slice(16)]:
        y = torch.full_like(Y, -1)
        y[:, t] = Y[:, t]
        with asked(f"forward fails in bf16, as FSDP computes: {BF16}"):
            logits, loss = ours(X, y)
        ask(loss.dtype == torch.float32, "compute the loss in float32: use model.cross_entropy")
        ask(loss.isfinite(), f"in bf16 the loss is {loss:.4f}: compute in float32 what needs its "
                             "digits, by x.float()")
        compares = is_causal(cfg) and logits is not None
        mean = each_loss(logits, y).mean() if compares else loss
        ask(close(loss, mean, 1e-3),
            "take the loss of bf16 logits in float32, by logits.float(), as model.cross_entropy "
            f"does: it is {loss:.4f}, not {mean:.4f}")


def loss_in_training(cfg):
    """The same, and terms for training only. 2: predicting another token adds up to 1."""
    ours = awake(cfg)
    alone = ours(X, Y_SOME)[1].item()
    ours.train()
    torch.manual_seed(0)
    loss = ours(X, Y_SOME)[1].item()
    ask(not is_causal(cfg) or 0.8 * alone < loss < 2 * alone,
        f"in training the loss is {loss:.4f}, and in eval mode {alone:.4f}: it must be the same "
        "mean, of the targets that are not -1, plus at most as much again")
    torch.manual_seed(0)
    with asked(f"forward fails under torch.autocast, as single and ddp compute in bf16: {BF16}"):
        with torch.autocast("cpu", torch.bfloat16):
            half = ours(X, Y_SOME)[1]
        half.backward()
    ask(half.dtype == torch.float32, "compute the loss in float32 in training too")
    ask(half.item() == pytest.approx(loss, rel=0.02),
        "in bf16 the loss is another: compute in float32 what needs its digits")


def any_device(cfg):
    """Two devices are told apart by meta and cpu."""
    ours = train.meta_model(cfg).to("meta")  # buffers too, which shard and allocate move
    idx = torch.zeros(3, 16, dtype=torch.long, device="meta")
    with asked("forward must run on any device, and on the meta device: make tensors with "
               "device=idx.device, and let no shape or branch depend on values"), OneDevice():
        ours(idx, idx)[1].backward()


class OneDevice(TorchDispatchMode):
    """As on a GPU, no operation takes tensors of two devices, but single numbers."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = filter(torch.is_tensor, tree_leaves((args, kwargs)))
        devices = {t.device for t in tensors if t.dim()}
        if len(devices) > 1:
            raise RuntimeError(f"{operation} of tensors on {len(devices)} devices")
        return operation(*args, **kwargs)


def gradients(cfg):
    """From tokens that are all one, whichever it is: experts without tokens get a gradient too."""
    ours = plain_model(cfg).train()
    for token in range(0, 67, 9):
        ours.zero_grad()
        idx = torch.full((1, 2 if is_causal(cfg) else cfg.sizes.block_size), token)
        ours(idx, idx)[1].backward()
        for name, p in ours.named_parameters():
            ask(p.grad is not None or not p.requires_grad,
                f"{name} has no gradient from a batch of one token, repeated: is something "
                "detached? If it was only not used, FSDP2 fills in zeros, but ddp would need "
                "PyTorch's find_unused_parameters: add 0 * what it computes to the output")


def loss_chunks(cfg):
    ours = awake(cfg).train()
    if not hasattr(ours, "head_loss"):  # it is optional
        return
    ask(hasattr(ours, "loss_chunks"),
        "set self.loss_chunks = 0 in Model.__init__, and let head_loss go by it: see model.py")
    whole = loss_and_gradients(ours)
    ours.loss_chunks = 3
    ask(ours(X, Y_SOME)[0] is None,
        "with loss_chunks no logits are kept: let forward call self.head_loss, and that go by "
        "self.loss_chunks")
    compare_values(loss_and_gradients(ours), whole, "loss_chunks", "see head_loss in model.py")


def loss_and_gradients(model):
    """{what it is: value}."""
    model.zero_grad()
    torch.manual_seed(0)
    loss = model(X, Y_SOME)[1]
    loss.backward()
    values = {"the loss": loss.detach()}
    for name, p in model.named_parameters():
        if p.requires_grad:
            values[f"the gradient of {name}"] = p.grad
    return values


def compare_values(values, expected, cause, remedy):
    for name, value in values.items():
        error = (value - expected[name]).norm()
        limit = 1e-6 + 1e-5 * expected[name].norm()
        ask(error <= limit, f"{cause} changes {name}: {remedy}")


def registration(cfg):
    """Blocks, and what is called once outside of them, are registered in the order of their use:
    `prefetch_blocks` relies on it."""
    ours = plain_model(cfg).train()
    layers = set(ours.blocks)
    names, homes, calls = {}, {}, []
    for name, module in ours.named_modules():
        block = next((b for b in layers if module in set(b.modules())), module)
        if module in layers or list(module.parameters(recurse=False)):
            names.setdefault(block, name)
            homes[module] = block
            module.register_forward_pre_hook(lambda module, args: calls.append(module))
    ours(X, Y)
    # What is called between the blocks, again and again, has no place in their order.
    used = [homes[m] for m in calls if homes[m] in layers or calls.count(m) == 1]
    used = [names[block] for block in dict.fromkeys(used)]
    order = [name for name in names.values() if name in used]
    ask(used == order, f"register modules in the order in which forward uses them: {used}")


class WithoutCache:
    """A model as `generate` sees it, whose forward takes no cache."""

    def __init__(self, model):
        self.model = model
        self.config = model.config

    def forward(self, idx):
        return self.model(idx)

    __call__ = forward


@torch.no_grad()
def generation(cfg):
    """Equal with a cache and without, within the context and beyond it."""
    if not is_causal(cfg):
        return
    ours = awake(cfg)
    for p in ours.parameters():
        p.mul_(3)  # decisive logits
    same = True
    if "cache" in inspect.signature(ours.forward).parameters:
        cache = [sample.KVCache() for _ in ours.blocks]
        pieces = [X[:, :3], *X[:, 3:].split(1, dim=1)]
        cached = torch.cat([ours(piece, cache=cache)[0] for piece in pieces], dim=1)
        same = close(cached, by_prefixes(ours, X)[:, 2:])
    beyond = [sample.generate(one, X[:, :3] % 60, 40, temperature=0, vocab_size=60)
              for one in (ours, WithoutCache(ours))]
    assert beyond[0].shape == (3, 43) and beyond[0].max() < 60
    ask(same and torch.equal(*beyond),
        "with a cache generation differs: hand cache[i] to block i and extend it there, with "
        "positions from cache[0].length on; or leave the parameter cache out of forward")


def recomputation(cfg):
    """Backward computes the rest of a block again, from the matrix products that it kept."""
    ours = awake(cfg).train()
    key = "activation_checkpointing=selective"
    remedy = "change no matrix product's output in place: write y = y + x, not y += x"
    for module in ours.modules():
        if isinstance(module, (torch.nn.RNNBase, torch.nn.RNNCellBase)):
            name = type(module).__name__
            remedy = f"torch's {name} changes products in place on CPUs; use full or none"
    expected = loss_and_gradients(ours)
    activations.checkpoint_activations(ours.blocks, "selective")
    with asked(f"{key} fails: {remedy}"):
        values = loss_and_gradients(ours)
    compare_values(values, expected, key, remedy)


CHECKS = (
    parts, parameters, forward, backward, blocks, units, random_numbers, who_sees_whom,
    loss_alone, loss_in_bf16, loss_in_training, any_device, gradients, loss_chunks, registration,
    generation)


# ---------- with --ranks: every mode gives the numbers of plain PyTorch -------

DDP = dict(strategy="ddp")
ZERO3 = dict(strategy="full_shard")
HYBRID = dict(strategy="hybrid_shard", shard_group_size=2)
SELECTIVE = dict(activation_checkpointing="selective")
FULL = dict(activation_checkpointing="full")
MODES = {  # name: (ranks, keys)
    "single": (1, {}),
    "half": (2, dict(ZERO3, dtype="bfloat16")),
    **{keys["strategy"]: (n, keys) for n, keys in WAYS.values()},
    "ddp-3": (3, DDP),
    "full-checkpointing": (3, dict(ZERO3, **FULL, activation_offload=True, wrap_min_params=1000)),
    "selective-checkpointing": (2, dict(ZERO3, **SELECTIVE)),
    "hybrid-selective": (4, dict(HYBRID, **SELECTIVE, grad_sync="last")),
    "compiled-ddp": (2, dict(DDP, **FULL, compile=True)),
    "compiled-full_shard": (2, dict(ZERO3, compile=True, cpu_offload=0.5, prefetch_blocks=1)),
}


def cases_of(tmp, model, world):
    """{name: (function, kwargs)}: a model's runs on so many ranks."""
    own, cases = dict(KEYS, tmp=tmp, model=model), {}
    for name, (size, keys) in MODES.items():
        if size == world:
            run = dict(own, name=f"{model}-{name}", **keys)
            cases[run["name"]] = run_compiled if "compile" in keys else run_training, run

    # 6 steps; and 2, then 2 more, then 2 more on 3 ranks
    if "dropout" in {f.name for f in fields(model_file(model).ModelConfig)}:
        own.update(dropout=0.1)
    if world == 2:
        whole = dict(own, name=f"{model}-whole", max_iters=6)
        cases[whole["name"]] = run_training, whole
    for end in {2: (2, 4), 3: (6,)}.get(world, ()):
        part = dict(own, name=f"{model}-parts", checkpoint="sharded", max_iters=end)
        cases[f"{model}-{end}"] = run_training, dict(part, init_from="auto")
    return cases


@functools.cache
def results_of(tmp, model, world):
    """Of its cases. 3 ranks go on from what 2 ranks leave."""
    if world == 3:
        results_of(tmp, model, 2)
    return on_ranks(world, cases_of(tmp, model, world))


@functools.cache
def expected_of(tmp, model):
    """What plain PyTorch gives, with its AdamW. Of another optimizer: what one process does."""
    *expected, counts = plain_training(small(tmp, model, strategy="single"))
    if "optimizer" in KEYS:
        rows = run_training(tmp, f"{model}-alone", model=model, **KEYS)
        expected = [[row[key] for row in rows] for key in ("loss", "grad_norm")]
        expected.append(read_ckpt(os.path.join(tmp, f"{model}-alone"))["model"])
    return *expected, counts


def compare(tmp, name, rows, expected, remedy):
    """The losses, norms and weights of the run `name` with those that are expected."""
    losses, norms, weights, counts = expected
    for key, theirs, limit in (("loss", losses, 1e-6), ("grad_norm", norms, 1e-5)):
        same = [row[key] for row in rows] == pytest.approx(theirs, rel=limit)
        ask(same, f"{key} differs in {name}: {remedy}")
    ours = read_ckpt(os.path.join(tmp, name))["model"]
    assert ours.keys() == weights.keys()
    for key in ours:
        where = counts.get(key, torch.tensor(True))
        off = ((ours[key] - weights[key]) * where).norm() / weights[key].norm().clamp(min=1e-3)
        ask(off <= 2e-5, f"{key} differs by {off:.1e} in {name}: {remedy}")


@pytest.mark.slow
@pytest.mark.usefixtures("sound")
@pytest.mark.parametrize("name", MODES)
def test_contract_modes(tmp, model, name):
    """The losses, norms and weights that are expected; in bf16 nearly."""
    world, _ = MODES[name]
    expected = expected_of(tmp, model)
    if world == 1:
        rows = run_training(tmp, f"{model}-single", model=model, **KEYS)
    else:
        rows = values(results_of(tmp, model, world), f"{model}-{name}")[0]
    if name == "half":
        ask(rows[0]["loss"] == pytest.approx(expected[0][0], rel=0.02),
            "FSDP casts a block's arguments to bf16: compute angles and the like inside the block")
    else:
        remedy = "keep state and collectives out of forward"
        compare(tmp, f"{model}-{name}", rows, expected, remedy)


@pytest.mark.slow
@pytest.mark.usefixtures("sound")
def test_contract_resume(tmp, model):
    """Bitwise at the same world size, and to 1e-5 at another."""
    remedy = "keep all state in parameters; nothing else is saved"
    rows = values(results_of(tmp, model, 2), f"{model}-whole")[0]
    whole = [row["loss"] for row in rows]
    rows = values(results_of(tmp, model, 3), f"{model}-6")[0]
    parts = [row["loss"] for row in rows]
    ask(parts[:4] == whole[:4], f"after a resume the losses are others: {remedy}")
    ask(parts == pytest.approx(whole, rel=1e-5), f"not at 3 ranks what was at 2: {remedy}")
