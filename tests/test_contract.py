"""
The contract of a model file, as tests of your file; docs/model_file.md explains it.

    python -m pytest -q tests/test_contract.py --model=NAME            # the file alone
    python -m pytest -q tests/test_contract.py --model=NAME --ranks    # and trained in every mode
    python -m pytest -q tests/test_contract.py                         # gpt2, llama, extras/moe.py

NAME is NAME.py, as train.py takes it. What a failure says is what to change in the file. On two
free CPU cores the first takes about 5 seconds. The second takes up to a minute: it goes on to train
the file on 1 to 4 processes, if all is well with the file alone. Sizes are those of TINY and
OTHERS in tests/harness.py, as far as your keys have these names; for others say --keys=width=30.
"""

import functools
import inspect
import os
import random
from contextlib import contextmanager
from dataclasses import fields, replace

import formulas
import numpy as np
import pytest
import torch
from harness import (
    HERE,
    arguments,
    on_ranks,
    plain_model,
    plain_training,
    read_ckpt,
    run_compiled,
    run_training,
)

import sample
import train
from configurator import load_config, model_file, resolve
from ranks import World, first_line

KEYS = dict(n_layer=2, max_iters=3, eval_interval=3)  # and those of --keys
USUAL = ["gpt2", *(["llama", "moe"] if os.path.exists(os.path.join(HERE, "extras")) else [])]
TOKENS = torch.randint(67, (2, 2, 16), generator=torch.Generator().manual_seed(0))  # x, y
SOME = torch.arange(16) < torch.tensor([[4], [12]])  # half of the targets, not as many in each row
WRONG = set()  # models whose file alone has failed


def pytest_generate_tests(metafunc):
    option = metafunc.config.getoption
    KEYS.update(key.split("=", 1) for key in option("--keys") or [])
    if "model" in metafunc.fixturenames:
        models = option("--model") or USUAL
        if "sound" in metafunc.fixturenames:  # it trains
            wanted = option("--ranks") or not option("--model")
            # gpt2 is trained if you ask for it; else test_fsdp.py and others do that
            models = [name for name in models if wanted and (option("--model") or name != "gpt2")]
        metafunc.parametrize("model", models)


@pytest.fixture
def sound(model):
    if model in WRONG:
        pytest.skip("it does not train before all is well with the file alone")


def small(tmp, model, **overrides):
    """The config of a small run, by way of flags, as a user's."""
    keys = {**KEYS, "model": model, "vocab_size": 67, **overrides}
    return load_config(arguments(tmp, "out", **keys))


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


# ---------- the file alone: one test, which ends with the first mistake --------


def test_contract_of_the_file(tmp, model):
    WRONG.add(model)
    try:
        keys = {f.name for f in fields(model_file(model).ModelConfig)}
        for key in ("block_size", "vocab_size", "n_layer"):
            ask(key in keys, f"add {key} to ModelConfig, as other files read it")
        cfg = small(tmp, model)
        for check in (parts, values, forward, random_numbers, loss_alone, loss_in_training,
                      on_meta, gradients, loss_chunks, registration, generation):
            check(cfg)
    except SystemExit as e:  # what train.py would say
        ask(False, str(e))
    WRONG.remove(model)


def parts(cfg):
    """What other files call; blocks with parameters of their own, made on meta and no scalars."""
    with asked("Model must be built on the meta device: __init__ decides names and shapes, and "
               "reads no values"):
        ours = train.meta_model(cfg)
    for name in ("config", "blocks", "initial_value"):
        ask(hasattr(ours, name), f"Model needs {name}: see docs/model_file.md")
    is_config = isinstance(ours.config, model_file(cfg.model).ModelConfig)
    ask(is_config, "set self.config = config in Model.__init__")
    with asked("Model.blocks must be an nn.ModuleList, or a property that returns one"):
        blocks = list(ours.blocks)
    ask(set(blocks) <= set(ours.modules()),
        "Model.blocks must be modules that the model has registered: make it an nn.ModuleList")
    ask(blocks, "Model.blocks must be the layers: they are FSDP's units")
    once = len(set(blocks)) == len(blocks)
    ask(once, "a block stands in Model.blocks twice: make one for each layer")
    units = {}  # {a block's name: block}; a block may have several names
    for name, layer in ours.named_modules(remove_duplicate=False):
        if layer in blocks:
            units[name + "."] = layer
            some = list(layer.parameters())
            ask(some, f"take {name} out of Model.blocks: it has no parameters")
    seen = {}  # {parameter: its first name, its unit}
    for name, p in ours.named_parameters(remove_duplicate=False):
        unit = next((units[start] for start in units if name.startswith(start)), ours)
        first, its_unit = seen.setdefault(p, (name, unit))
        ask(unit is its_unit,
            f"{first} and {name} are one parameter in two units, which FSDP gathers one at a time: "
            "make one for each block")
        ask(p.is_meta, f"{name} must be made where torch.device says, so by no .to() or cpu()")
        ask(p.dim(), f"make {name} a vector of one number: FSDP2 shards no scalar")


def values(cfg):
    """A first value for every parameter, from seed and name alone."""
    ours = train.meta_model(cfg)
    drawn_by = {}  # {name: value} of what the seed decides
    for name, p in ours.named_parameters():
        drawn = []
        for global_seed, seed in ((1, 5), (2, 5), (2, 6)):
            torch.manual_seed(global_seed)
            with asked(f"initial_value must know {name}"):
                drawn.append(ours.initial_value(name, p.shape, seed))
        value, again, other = drawn
        is_tensor = isinstance(value, torch.Tensor)
        ask(is_tensor, f"initial_value returns a {type(value).__name__} for {name}, not a tensor")
        on_cpu = value.dtype == torch.float32 and value.device.type == "cpu"
        ask(on_cpu and value.shape == p.shape,
            f"initial_value({name}) must return {tuple(p.shape)} in float32 on the CPU")
        ask(value.isfinite().all(), f"initial_value({name}) must be finite")
        ask(torch.equal(value, again), f"draw initial_value({name}) from seed and name: use normal")
        if not torch.equal(value, other):  # a table of decays, say, needs no seed
            twin = next((n for n, v in drawn_by.items() if torch.equal(v, value)), None)
            ask(not twin, f"{name} and {twin} start equal: draw initial_value from the name too")
            drawn_by[name] = value
    ask(drawn_by, "draw initial_value from its seed: no parameter depends on it")


def forward(cfg):
    """Shapes and types, the order of the blocks, and nothing that __init__ has not made."""
    ours = plain_model(cfg).train()
    before = dict(ours.named_parameters())
    x, y = TOKENS
    with asked("forward fails on token ids (B, T), and as many targets"):
        answers = ours(x, y), ours(x)
    for answer in answers:
        pair = isinstance(answer, tuple) and len(answer) == 2
        ask(pair, "forward must return a pair, (logits, loss)")
    with asked("forward must take any T up to block_size"):
        ours(x[:, :5], y[:, :5].contiguous())
    called = []
    for block in ours.blocks:
        block.register_forward_pre_hook(lambda block, args: called.append(block))
    logits, loss = ours(x, y)
    made = [name for name, p in ours.named_parameters() if before.get(name) is not p]
    ask(not made, f"make {', '.join(made)} in Model.__init__, not in forward: what forward makes "
                  "is not sharded, trained or saved")
    in_order = called == list(ours.blocks)
    ask(in_order, "call each block once, as block(x), not block.forward(x), in their order")
    right = logits is None or logits.shape == (2, 16, 67)
    ask(right, "with targets forward returns logits (B, T, V), or None")
    single = isinstance(loss, torch.Tensor) and loss.shape == () and loss.dtype == torch.float32
    ask(single, "with targets forward returns the mean loss, one number in float32")
    with asked("change nothing in place that backward needs"):
        loss.backward()
    wrapped, _ = train.build(resolve(cfg, World(), distributed=False), World())
    with asked("make tensors in forward, or parameters: those that __init__ makes get no values"):
        wrapped(x, y)
    last, none = ours(x)
    ask(last.shape == (2, 1, 67) and none is None,
        "without targets forward returns the logits of the last position, (B, 1, V), and None")


def random_numbers(cfg):
    """From torch's global generator, which training seeds, and from nowhere else."""
    if hasattr(cfg, "dropout"):
        cfg = replace(cfg, dropout=0.5)
    ours = plain_model(cfg).train()

    def loss(seed_of_others):
        random.seed(seed_of_others)
        np.random.seed(seed_of_others)
        torch.manual_seed(1)
        return ours(*TOKENS)[1].item()

    same = len({loss(0) for _ in range(4)}) == 1
    ask(same, "forward must keep no state, and draw random numbers from torch's global generator "
              "alone: a second call with the same batch and seed gives another loss")
    same = len({loss(seed) for seed in range(8)}) == 1
    ask(same, "draw random numbers from torch, not from Python's random or NumPy's, which training "
              "does not seed")
    ours.eval()
    same = ours(*TOKENS)[1].item() == ours(*TOKENS)[1].item()
    ask(same, "draw no random numbers in eval mode: F.dropout needs training=self.training")


@torch.no_grad()
def by_prefixes(model, x):
    """Logits (B, T, V), each from a forward of the tokens up to its position, without targets."""
    return torch.cat([model(x[:, :t])[0] for t in range(1, x.size(1) + 1)], dim=1)


def close(a, b):
    return (a - b).norm() <= 1e-4 * b.norm()


def each_loss(logits, y):
    """The cross-entropy of the targets that are not -1, one number each, in fp32."""
    chances = logits.float().log_softmax(dim=-1)
    counts = y != -1
    return -chances[counts].gather(1, y[counts][:, None])


def as_fsdp_in_bf16(model):
    """Parameters in bf16, and the floating-point arguments of a block."""
    def cast(block, args):
        return tuple(a.bfloat16() if torch.is_tensor(a) and a.is_floating_point() else a
                     for a in args)

    for block in model.blocks:
        block.register_forward_pre_hook(cast)
    return model.bfloat16()


@torch.no_grad()
def loss_alone(cfg):
    """In eval mode: the mean cross-entropy of the targets that count, in fp32 and in bf16."""
    ours = plain_model(cfg)
    x, y = TOKENS
    y = y.where(SOME, -1)
    with asked("targets of -1 do not count: use model.cross_entropy"):
        logits, loss = ours(x, y)
        _, of_others = ours(x.where(SOME, 66 - x), y)
    ask(loss.item() == pytest.approx(of_others.item(), rel=1e-5),
        "a position's logits must depend on no later token: mask what comes later")
    expected = by_prefixes(ours, x)
    ask(logits is None or close(logits, expected),
        "without targets, and of fewer tokens, the logits are others")
    each = each_loss(expected, y)
    mean = each.mean().item()
    why = "use model.cross_entropy, and add what is for training only if self.training"
    for total, name in ((each.sum(), "their sum"),
                        (each.sum() / y.numel(), "divided by all targets, ignored ones too")):
        if loss.item() == pytest.approx(total.item(), rel=1e-4):
            why = f"it is {name}; use model.cross_entropy"
    ask(loss.item() == pytest.approx(mean, rel=1e-4),
        f"in eval mode the loss must be the mean cross-entropy of the targets that are not -1, "
        f"here {mean:.4f}, not {loss.item():.4f}: {why}")
    half = as_fsdp_in_bf16(ours)
    for t in range(16):
        alone = torch.full_like(y, -1)
        alone[:, t] = TOKENS[1][:, t]
        logits, loss = half(x, alone)
        ask(loss.dtype == torch.float32, "compute the loss in float32: use model.cross_entropy")
        if logits is not None:
            mean = each_loss(logits, alone).mean().item()
            ask(loss.item() == pytest.approx(mean, rel=1e-3),
                "take the loss of bf16 logits in float32, by logits.float(), as "
                f"model.cross_entropy does: it is {loss.item():.4f}, not {mean:.4f}")


def loss_in_training(cfg):
    """The same, and terms for training only. 2: predicting another token adds up to 1."""
    x, y = TOKENS
    y = y.where(SOME, -1)
    ours = plain_model(cfg)
    alone = ours(x, y)[1].item()
    loss = ours.train()(x, y)[1].item()
    ask(0.8 * alone < loss < 2 * alone,
        f"in training the loss is {loss:.4f}, and in eval mode {alone:.4f}: it must be the same "
        "mean, of the targets that are not -1, plus at most as much again")
    with torch.autocast("cpu", torch.bfloat16):
        half = ours(x, y)[1]
    half.backward()
    ask(half.dtype == torch.float32, "compute the loss in float32 in training too")
    ask(half.item() == pytest.approx(loss, rel=0.02),
        "in bf16 the loss is another: compute in float32 what needs its digits")


def on_meta(cfg):
    with asked("forward must run on the meta device: let no shape or branch depend on values"):
        idx = torch.zeros(1, 16, dtype=torch.long, device="meta")
        train.meta_model(cfg)(idx, idx)[1].backward()


def gradients(cfg):
    """From two tokens that are one, whichever it is: experts without tokens get a gradient too."""
    ours = plain_model(cfg).train()
    for token in range(0, 67, 9):
        ours.zero_grad()
        idx = torch.tensor([[token, token]])
        ours(idx, idx)[1].backward()
        for name, p in ours.named_parameters():
            ask(p.grad is not None,
                f"{name} has no gradient from a batch of two tokens: is something detached? If it "
                "was only not used, FSDP2 fills in zeros, but ddp would need PyTorch's "
                "find_unused_parameters: add 0 * what it computes to the output")


def loss_chunks(cfg):
    ours = plain_model(cfg).train()
    if not hasattr(ours, "head_loss"):  # it is optional
        return
    ask(hasattr(ours, "loss_chunks"),
        "set self.loss_chunks = 0 in Model.__init__, and let head_loss go by it: see model.py")
    x, y = TOKENS.clone()
    y[:, 9:] = -1
    whole = ours(x, y)[1]
    whole.backward()
    expected = {name: p.grad for name, p in ours.named_parameters()}
    ours.zero_grad()
    ours.loss_chunks = 3
    logits, loss = ours(x, y)
    ask(logits is None, "with loss_chunks no logits are kept: let forward call self.head_loss, and "
                        "that go by self.loss_chunks")
    loss.backward()
    ask(loss.item() == pytest.approx(whole.item(), rel=1e-6), "loss_chunks changes the loss")
    for name, p in ours.named_parameters():
        same = (p.grad - expected[name]).norm() <= 1e-6 + 1e-5 * expected[name].norm()
        ask(same, f"loss_chunks changes the gradient of {name}: see head_loss in model.py")


def registration(cfg):
    """Root and blocks are registered in the order of their first use: `freeze` relies on it."""
    ours = plain_model(cfg).train()
    names, used = {}, []
    for name, module in ours.named_modules():
        block = next((b for b in ours.blocks if module in set(b.modules())), module)
        if module in set(ours.blocks) or list(module.parameters(recurse=False)):
            names.setdefault(block, name)
            module.register_forward_pre_hook(lambda *_, block=block: used.append(block))
    ours(*TOKENS)
    used = [names[block] for block in dict.fromkeys(used)]
    order = [name for name in names.values() if name in used]
    ask(used == order, f"register modules in the order in which forward uses them: {used}")


@torch.no_grad()
def generation(cfg):
    """Equal with a cache and without, within the context and beyond it."""
    ours = plain_model(cfg)
    for p in ours.parameters():
        p.mul_(3)  # decisive logits
    x = TOKENS[0]
    same = True
    if "cache" in inspect.signature(ours.forward).parameters:
        cache = [sample.KVCache() for _ in ours.blocks]
        pieces = [x[:, :3], *x[:, 3:].split(1, dim=1)]
        cached = torch.cat([ours(piece, cache=cache)[0] for piece in pieces], dim=1)
        same = close(cached, by_prefixes(ours, x)[:, 2:])
    beyond = [sample.generate(ours, x[:, :3] % 60, 40, temperature=0, vocab_size=60, use_cache=use)
              for use in (True, False)]
    assert beyond[0].shape == (2, 43) and beyond[0].max() < 60
    ask(same and torch.equal(*beyond),
        "with a cache generation differs: hand cache[i] to block i and extend it there, with "
        "positions from cache[0].length on; or leave the parameter cache out of forward")


# ---------- with --ranks: every mode gives the numbers of plain PyTorch -------

DDP, ZERO2, ZERO3 = (dict(strategy=name) for name in ("ddp", "shard_grad_op", "full_shard"))
HYBRID = dict(strategy="hybrid_shard", shard_group_size=2)
MUON = dict(optimizer="muon")
MODES = {  # name: (ranks, keys)
    "single": (1, {}), "half": (2, dict(ZERO3, dtype="bfloat16")),
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


def cases_of(tmp, model, world, **more):
    """{name: (function, kwargs)}: a model's runs on so many ranks."""
    own, cases = dict(KEYS, tmp=tmp, model=model, **more), {}
    for name, (size, keys) in MODES.items():
        if size == world:
            run = dict(own, name=f"{model}-{name}", **keys)
            # whole, evaluation too takes long; compiled-full_shard has it
            cases[run["name"]] = run_compiled if name == "compiled-ddp" else run_training, run

    # 6 steps; and 2, then 2 more, then 2 more on 3 ranks
    if "dropout" in {f.name for f in fields(model_file(model).ModelConfig)}:
        own.update(dropout=0.1)
    if world == 2:
        whole = dict(own, name=f"{model}-whole", max_iters=6)
        cases[whole["name"]] = run_training, whole
    for kind in ("full", "sharded"):
        for end in {2: (2, 4), 3: (6,)}.get(world, ()):
            part = dict(own, name=f"{model}-{kind}", checkpoint=kind, max_iters=end)
            part.update(init_from="scratch" if end == 2 else "resume")
            cases[f"{model}-{kind}-{end}"] = run_training, part
    return cases


RESULTS = {}  # {(model, world): of its cases}


def results_of(tmp, model, world):
    """Run once; 3 ranks go on from what 2 ranks leave."""
    if (model, world) not in RESULTS:
        if world == 3:
            results_of(tmp, model, 2)
        RESULTS[model, world] = on_ranks(world, cases_of(tmp, model, world))
    return RESULTS[model, world]


def ran(results, name):
    """The rows of a run."""
    for rank in results[name]:
        last = rank.get("error", "").strip().rpartition("\n")[2]
        ask("error" not in rank,
            f"{name} does not run: use a block's parameters in its own forward only, and with "
            f"wrap_min_params those of any module ({last})")
    return results[name][0]["value"]


@functools.cache
def plain(tmp, model, **more):
    return plain_training(small(tmp, model, strategy="single", **more))


@functools.cache
def muon(tmp, model):
    """(losses, norms, weights) of Muon in one process; test_muon.py has its proof."""
    name = f"{model}-muon"
    rows = run_training(tmp, name, model=model, **MUON, **KEYS)
    losses, norms = ([row[key] for row in rows] for key in ("loss", "grad_norm"))
    return losses, norms, read_ckpt(os.path.join(tmp, name))["model"]


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


@pytest.mark.usefixtures("sound")
@pytest.mark.parametrize("name", MODES)
def test_contract_modes(tmp, model, name):
    """The losses, norms and weights of plain PyTorch; with Muon, of one process; in bf16 nearly."""
    world, _ = MODES[name]
    expected = plain(tmp, model)
    if name.startswith("muon"):
        expected = *muon(tmp, model), expected[-1]
    if world == 1:
        rows = run_training(tmp, f"{model}-single", model=model, **KEYS)
    else:
        rows = ran(results_of(tmp, model, world), f"{model}-{name}")
    if name == "half":
        ask(rows[0]["loss"] == pytest.approx(expected[0][0], rel=0.02),
            "FSDP casts a block's arguments to bf16: compute angles and the like inside the block")
    else:
        remedy = "keep state, random numbers and collectives out of forward"
        if "selective" in name:
            remedy = ("forward must not change a matrix product's output in place, "
                      "as torch's GRUCell does on a CPU")
        compare(tmp, f"{model}-{name}", rows, expected, remedy)


@pytest.mark.usefixtures("sound")
def test_contract_resume(tmp, model):
    """Bitwise at the same world size, and to 1e-5 at another, from both kinds of checkpoint."""
    remedy = "keep all state in parameters; nothing else is saved"
    rows = ran(results_of(tmp, model, 2), f"{model}-whole")
    whole = [row["loss"] for row in rows]
    for kind in ("full", "sharded"):
        rows = ran(results_of(tmp, model, 3), f"{model}-{kind}-6")
        parts = [row["loss"] for row in rows]
        ask(parts[:4] == whole[:4], f"after a resume the losses are others: {remedy}")
        ask(parts == pytest.approx(whole, rel=1e-5), f"not at 3 ranks what was at 2: {remedy}")


@pytest.mark.usefixtures("sound")
def test_contract_plan(tmp, model):
    """A rehearsed step keeps the parameters and gradients that there are."""
    rehearse = pytest.importorskip("extras.rehearse").rehearse
    world = World(size=2, local_size=2)
    cfg = resolve(small(tmp, model), world, distributed=True)
    device, _ = formulas.kept(train.meta_model(cfg), cfg, world)
    timeline, marks, _ = rehearse(cfg, world)
    where = {name: n for n, name in marks}
    _, parameters, _, gradients, *_ = timeline[where["optimizer"]]
    ask(parameters == device["parameters"], "the plan counts other parameters than there are")
    ask(gradients == pytest.approx(device["gradients"], rel=0.02),
        "in the plan's step the gradients are others than the parameters'")
