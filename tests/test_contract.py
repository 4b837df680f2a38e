"""
The contract of a model file, as tests of your file; docs/model_file.md explains it.

    python -m pytest -q tests/test_contract.py --model=NAME    # NAME.py, as train.py takes it
    python -m pytest -q tests/test_contract.py                 # gpt2, llama and extras/moe.py

What a failure says is what to change in the file. Sizes are those of TINY and OTHERS in
tests/harness.py, as far as your keys have these names; for others say --keys=width=30.
"""

import functools
import os
import re
from contextlib import contextmanager
from dataclasses import fields

import formulas
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

import metrics
import sample
import train
from configurator import load_config, model_file, resolve
from data.loader import Batches
from ranks import World, first_line

KEYS = dict(n_layer=2, max_iters=3, eval_interval=3)  # and those of --keys
USUAL = ["gpt2", *(["llama", "moe"] if os.path.exists(os.path.join(HERE, "extras")) else [])]
TOKENS = torch.randint(67, (2, 2, 16), generator=torch.Generator().manual_seed(0))  # x, y


def pytest_generate_tests(metafunc):
    option = metafunc.config.getoption
    KEYS.update(key.split("=", 1) for key in option("--keys") or [])
    if "model" in metafunc.fixturenames:
        # gpt2 is trained if you ask for it; else test_fsdp.py and others do that
        trained = metafunc.function in (test_contract_modes, test_contract_resume)
        metafunc.parametrize("model", option("--model") or USUAL[trained:])


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


# ---------- the file alone ----------------------------------------------------


def test_contract_parts(tmp, model):
    """What other files read; blocks with parameters, which are made on meta and no scalars."""
    module = model_file(model)
    keys = {f.name for f in fields(module.ModelConfig)}
    for key in ("block_size", "vocab_size", "n_layer"):
        ask(key in keys, f"add {key} to ModelConfig, as other files read it")
    ours = train.meta_model(small(tmp, model))
    for name in ("config", "blocks", "initial_value"):
        ask(hasattr(ours, name), f"Model needs {name}: see docs/model_file.md")
    ask(isinstance(ours.config, module.ModelConfig), "set self.config = config in Model.__init__")
    blocks = set(ours.blocks)
    ask(blocks, "Model.blocks must be the layers: they are FSDP's units")
    for name, layer in ours.named_modules():
        has_some = layer not in blocks or list(layer.parameters())
        ask(has_some, f"take {name} out of Model.blocks: it has no parameters")
    for name, p in ours.named_parameters():
        ask(p.is_meta, f"{name} must be made where torch.device says, so by no .to() or cpu()")
        ask(p.dim(), f"make {name} a vector of one number: FSDP2 shards no scalar")


def test_contract_values(tmp, model):
    """A first value for every parameter, from seed and name alone."""
    ours = train.meta_model(small(tmp, model))
    random = {}
    for name, p in ours.named_parameters():
        drawn = []
        for global_seed, seed in ((1, 5), (2, 5), (2, 6)):
            torch.manual_seed(global_seed)
            drawn.append(ours.initial_value(name, p.shape, seed))
        value, again, other = drawn
        on_cpu = value.dtype == torch.float32 and value.device.type == "cpu"
        ask(on_cpu and value.shape == p.shape,
            f"initial_value({name}) must return {tuple(p.shape)} in float32 on the CPU")
        ask(value.isfinite().all(), f"initial_value({name}) must be finite")
        ask(torch.equal(value, again), f"draw initial_value({name}) from seed and name: use normal")
        if value.std() > 0:
            ask(not torch.equal(value, other), f"draw initial_value({name}) from its seed")
            twin = next((n for n, v in random.items() if torch.equal(v, value)), None)
            ask(not twin, f"{name} and {twin} start equal: draw initial_value from the name too")
            random[name] = value


def test_contract_forward(tmp, model):
    """Shapes, types, the order of the blocks; on meta and in bf16."""
    ours = plain_model(small(tmp, model)).train()
    x, y = TOKENS.clone()
    called = []
    for block in ours.blocks:
        block.register_forward_pre_hook(lambda block, args: called.append(block))
    logits, loss = ours(x, y)
    in_order = called == list(ours.blocks)
    ask(in_order, "call each block once, as block(x), not block.forward(x), in their order")
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
    if not hasattr(ours, "head_loss"):
        pytest.skip("it has no head_loss, which is optional")
    x, y = TOKENS.clone()
    y[:, 9:] = -1
    whole = ours(x, y)[1]
    whole.backward()
    expected = {name: p.grad for name, p in ours.named_parameters()}
    ours.zero_grad()
    ours.loss_chunks = 3
    logits, loss = ours(x, y)
    ask(logits is None, "with loss_chunks no logits are kept: let forward call self.head_loss")
    loss.backward()
    ask(loss.item() == pytest.approx(whole.item(), rel=1e-6), "loss_chunks changes the loss")
    for name, p in ours.named_parameters():
        close = (p.grad - expected[name]).norm() <= 1e-6 + 1e-5 * expected[name].norm()
        ask(close, f"loss_chunks changes the gradient of {name}: see head_loss in model.py")


def test_contract_gradients(tmp, model):
    """From a batch of one token, whichever it is: experts without tokens get one too."""
    ours = plain_model(small(tmp, model)).train()
    for token in range(0, 67, 9):
        ours.zero_grad()
        idx = torch.tensor([[token]])
        ours(idx, idx)[1].backward()
        for name, p in ours.named_parameters():
            ask(p.grad is not None,
                f"{name} has no gradient from a batch of one token. FSDP2 fills in zeros, but "
                "--strategy=ddp would need PyTorch's find_unused_parameters: add 0 * what it "
                "computes to the output, or never use ddp")


def test_contract_registration(tmp, model):
    """Root and blocks are registered in the order of their first use: `freeze` relies on it."""
    ours = plain_model(small(tmp, model))
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


def test_contract_generation(tmp, model):
    """Equal with a cache and without, within the context and beyond it."""
    ours = plain_model(small(tmp, model))
    for p in ours.parameters():
        p.data.mul_(3)  # decisive logits
    prompt = TOKENS[0, :, :3] % 60
    for length in (8, 40):
        cached, plain = (sample.generate(ours, prompt, length, temperature=0, vocab_size=60,
                                         use_cache=use) for use in (True, False))
        assert cached.shape == (2, 3 + length) and cached.max() < 60
        ask(torch.equal(cached, plain),
            "with a cache generation differs: hand cache[i] to block i and extend it there, with "
            "positions from cache[0].length on; or leave the parameter cache out of forward")
    if cached[0, 3:].unique().numel() == 1:
        pytest.skip("generation repeats one token, which proves nothing")


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


# ---------- trained: every mode gives the numbers of plain PyTorch ------------

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
            f"{name} does not run: use a block's parameters in its own forward only ({last})")
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
        compare(tmp, f"{model}-{name}", rows, expected,
                "keep state, random numbers and collectives out of forward")


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


# ---------- the contract's own proof ------------------------------------------
# The smallest file, and copies of moe.py, each with one fault, whose failure says what to change.

NORMAL = "return normal(shape, 0.02, key=(seed, name))"
LAST = "ModelConfig = MoEConfig\nModel = MoE"
LOSS = "loss + self.config.balance * unbalanced / self.config.n_layer"
EXPERTS = "self.mlp = Experts(config)"
HEAD = "logits, loss = self.head_loss(x, targets)"
OWN = "logits = self.lm_head(x)\n        loss = F.cross_entropy(logits.transpose(1, 2), targets"
COMPUTE = "            y = F.linear"
BRANCH = f"            if not weights[..., e].any():\n                continue\n{COMPUTE}"
STACK = "nn.Parameter(torch.empty(E, 2 * C, C))"
LIST = "nn.ParameterList([torch.empty(2 * C, C) for _ in range(E)])"
LAYERS = "        self.transformer.h ="
REVERSED = "        self.transformer = nn.ModuleDict(dict(reversed(self.transformer.items())))\n"
FAULTS = {  # name: (which test, its sentence, then what moe.py has, what its copy has instead, ...)
    "sizes": ("parts", "add block_size to ModelConfig", LAST,
              "@dataclass\nclass ModelConfig:\n    vocab_size: int = 9\n\n\nModel = MoE"),
    "buffer": ("parts", r"transformer\.h\.0\.angles: .* compute it in forward", EXPERTS,
               f"{EXPERTS}\n        self.register_buffer('angles', torch.empty(2))"),
    "blocks": ("parts", r"take .*h\.0 out of", "[Block(config) for", "[nn.Identity() for"),
    "scalar": ("parts", r"make transformer\.h\.0\.bias a vector of one number", EXPERTS,
               f"{EXPERTS}\n        self.bias = nn.Parameter(torch.empty(()))"),
    "device": ("parts", "c_fc must be made where", "(E, 2 * C, C)", "(E, 2 * C, C, device='cpu')"),
    "other random": ("values", "name: use normal", NORMAL, "return torch.randn(shape)"),
    "no seed": ("values", "from its seed", NORMAL, "return normal(shape, 0.02, key=name)"),
    "no name": ("values", "start equal", NORMAL, "return normal(shape, 0.02, key=(seed,))"),
    "no value": ("values", "c_fc has no initial value: add it to initial_value", NORMAL, "pass"),
    "hooks": ("forward", "call each block once", "block(x, None", "block.forward(x, None"),
    "last": ("forward", "of the last position", "self.lm_head(last)", "self.lm_head(x)"),
    "padding": ("forward", "targets of -1 do not count", HEAD, f"{OWN})"),
    "bf16": ("forward", "compute the loss in float32", LOSS, f"({LOSS}).to(logits.dtype)"),
    "meta": ("forward", "forward must run on the meta device", COMPUTE, BRANCH),
    "chunks": ("loss_chunks", "forward call self.head_loss", HEAD, f"{OWN}, ignore_index=-1)"),
    "idle": ("gradients", r"c_fc\.\d has no gradient .* ddp", STACK, LIST, COMPUTE, BRANCH),
    "order": ("registration", "register modules in the order", LAYERS, REVERSED + LAYERS),
    "positions": ("generation", "with a cache", "0 if cache is None else cache[0].length", "0"),
    "outside": ("modes", "use a block's parameters in its own forward only", LOSS,
                f"{LOSS} + 0 * self.blocks[0].ln_1.weight.sum()"),
    "state": ("modes", "keep state, random numbers and collectives out of forward", LOSS,
              f"({LOSS}) * (1 + len(self.calls) / 99)\n\n    calls = property(lambda self: self."
              "__dict__.setdefault('_calls', []).append(1) or self._calls)"),
}


@pytest.fixture
def copy(models, request):
    """copy(name, before, after, ...): --model=moe_<name> is moe.py with changes."""
    if request.config.getoption("--model"):
        pytest.skip("the contract's own proof, not of your file")

    def make(name, *changes):
        with open(os.path.join(HERE, "extras", "moe.py")) as f:
            code = f.read()
        for before, after in zip(changes[::2], changes[1::2]):
            assert before in code
            code = code.replace(before, after)
        (models / f"moe_{name}.py").write_text(code)
        return f"moe_{name}"
    return make


@pytest.mark.parametrize("name", FAULTS)
def test_contract_says_what_to_change(tmp, copy, name):
    test, sentence, *changes = FAULTS[name]
    faulty = copy(name.replace(" ", "_"), *changes)
    more = []
    if test == "modes":
        more, run = ["full_shard-2"], f"{faulty}-full_shard-2"
        RESULTS[faulty, 2] = on_ranks(2, {run: cases_of(tmp, faulty, 2)[run]})
    with pytest.raises(BaseException, match=sentence) as e:
        globals()[f"test_contract_{test}"](tmp, faulty, *more)
    assert "\n" not in str(e.value)


def test_contract_holds_for_the_smallest_file(tmp, copy, models):
    """docs/model_file.md has it; it lacks all that is optional."""
    with open(os.path.join(HERE, "docs", "model_file.md")) as f:
        code = re.search(r"^```python\n(.*?)^```", f.read(), re.M | re.S)[1]
    (models / "smallest.py").write_text(code)
    for test in ("parts", "values", "forward", "gradients", "registration", "generation"):
        globals()[f"test_contract_{test}"](tmp, "smallest")
    with pytest.raises(BaseException, match="no head_loss"):  # skipped
        test_contract_loss_chunks(tmp, "smallest")


# ---------- experts without tokens, in a copy that leaves them out ------------
# Some idle in each micro-batch. In a whole step none does, but expert 0, which is never used.


@pytest.fixture
def idle(copy):
    never = BRANCH.replace("if not", "if e == 0 or not")
    return copy("sparse", STACK, LIST, COMPUTE, never, "n_expert: int = 4", "n_expert: int = 8",
                "n_active: int = 2", "n_active: int = 1")


@pytest.mark.parametrize("world", [2, 3, 4])
def test_contract_idle_experts_train_when_sharded(tmp, idle, world):
    """As in one process with the same rows, which has gradients of all but expert 0. That one
    AdamW leaves alone there. Sharded it has a gradient of zeros: its weights decay. DDP stops."""
    cfg = small(tmp, idle, batch_size=1)
    lacking = []
    for micro in range(2):  # of the first two ranks
        ours = plain_model(cfg).train()
        ours(*Batches(cfg, World()).train(0, micro))[1].backward()
        lacking.append({name for name, p in ours.named_parameters() if p.grad is None})
    assert lacking[0] - lacking[1] and lacking[1] - lacking[0]  # else this proves nothing

    runs = cases_of(tmp, idle, world, batch_size=1)
    apart = ("half", "muon", "compiled-ddp", "ddp-3")
    names = [name for name in MODES if MODES[name][0] == world and not name.startswith(apart)]
    results = on_ranks(world, {name: runs[f"{idle}-{name}"] for name in names}, timeout=150)
    if world == 2:
        assert "find_unused_parameters" in results.pop("ddp-2")[0]["error"]

    expected = plain(tmp, idle, batch_size=1)
    unused = "transformer.h.1.mlp.c_fc.0"
    start = plain_model(cfg).get_parameter(unused)
    assert torch.equal(expected[2][unused], start)
    for name in results:
        run = f"{idle}-{name}"
        compare(tmp, run, ran(results, name), expected, "FSDP2 fills in zeros")
        left = read_ckpt(os.path.join(tmp, run))["model"][unused]
        assert 0.9 < left.norm() / start.norm() < 1  # it decays


def test_contract_run_without_flops_says_so_once(tmp, idle, capsys, monkeypatch):
    monkeypatch.setattr(metrics, "peak_flops", lambda device: 1e12)  # else nobody counts
    rows = run_training(tmp, "idle-single", model=idle, **KEYS)
    assert [row["mfu"] for row in rows] == [None] * 3
    assert len(re.findall("^mfu n/a: .* meta ", capsys.readouterr().out, re.M)) == 1
