"""
Muon: the update of whole matrices, though a rank keeps only some rows of each.

    python -m pytest -q tests/test_optimizer.py

The reference is Muon in plain PyTorch in one process, written here; the update rule is also
torch.optim.Muon's. AdamW's numbers are tested in test_fsdp.py, the schedule in test_config.py.
"""

import functools
import math
import os
import re
import shutil
from collections import Counter
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import formulas
import pytest
import torch
import torch.distributed as dist
from harness import (
    arguments,
    assert_same_weights,
    launch,
    losses,
    on_ranks,
    plain_gpt,
    plain_model,
    read_ckpt,
    run_compiled,
    run_training,
    tiny,
    trained,
    two_each,
    values,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F

import checkpoint
import fsdp
import optimizer
import train
from configurator import resolve
from data import loader
from ranks import World, setup

MUON = dict(optimizer="muon", momentum=0.9, weight_decay=0.3)
HYBRID = dict(strategy="hybrid_shard", shard_group_size=2)
FREEZE = r"wte|h\.0\.(ln_1|mlp)|h\.1\.attn"

# -----------------------------------------------------------------------------
# parity


def is_muons(name, p):
    return ".h." in name and p.dim() == 2


def plain_muon(p, momentum, rate, decay=0.3, beta=0.9):
    """One update as Jordan et al. and Liu et al. write it, of a whole matrix."""
    momentum.mul_(beta).add_(p.grad, alpha=1 - beta)
    X = (1 - beta) * p.grad + beta * momentum
    X = X / X.norm()
    for _ in range(5):
        A = X.T @ X
        X = 3.4445 * X - 4.7750 * X @ A + 2.0315 * X @ A @ A
    p.data = p.data - rate * decay * p.data - rate * 0.2 * math.sqrt(max(p.shape)) * X


@pytest.fixture(scope="module")
def plain(tmp):
    """plain(key=value, ...) -> losses and weights of five steps in plain PyTorch."""
    def train_plain(freeze=None, **sizes):
        cfg = tiny(tmp, **sizes)
        files = loader.TokenFiles(cfg.dataset, "train", cfg.block_size, 67)
        gpt = plain_model(cfg)
        gpt.lm_head.register_forward_hook(lambda head, args, out: setattr(head, "out", out))
        for name, p in gpt.named_parameters():
            p.requires_grad_(not (freeze and re.search(freeze, name)))
        named = [(n, p) for n, p in gpt.named_parameters() if p.requires_grad]
        momenta = {p: torch.zeros_like(p) for name, p in named if is_muons(name, p)}
        rest = [p for _, p in named if p not in momenta]
        adamw = torch.optim.AdamW(
            [{"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.3},
             {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0}],
            betas=(cfg.beta1, cfg.beta2), foreach=False, fused=False)
        out, samples = [], cfg.gradient_accumulation_steps * cfg.batch_size
        # warm-up over 2 steps to 1e-3, then a cosine to 1e-4 at step 20
        for step, rate in enumerate([1 / 3e3, 2 / 3e3, 1e-3, 9.931634888e-4, 9.728616794e-4]):
            x, y = files.batch(loader.train_order(len(files), cfg.seed, step * samples, samples))
            gpt(x, y)  # whose logits are detached
            loss = F.cross_entropy(gpt.lm_head.out.view(-1, 67), y.view(-1))
            gpt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([p for _, p in named], cfg.grad_clip)
            for p, momentum in momenta.items():
                plain_muon(p, momentum, rate)
            for group in adamw.param_groups:
                group["lr"] = rate
            adamw.step()
            out.append(loss.item())
        return out, dict(gpt.state_dict())
    return functools.cache(train_plain)


RUNS = {  # name: (ranks, keys); no size divides 67 or 30, and 5 rows on 4 ranks leave one without
    "ddp-2": (2, dict(strategy="ddp")), "full_shard-2": (2, dict(strategy="full_shard")),
    "ddp-3": (3, dict(strategy="ddp")), "full_shard-3": (3, dict(strategy="full_shard")),
    "ddp-4": (4, dict(strategy="ddp")), "full_shard-4": (4, dict(strategy="full_shard")),
    "hybrid_shard-4": (4, HYBRID),
    "offload-2": (2, dict(strategy="shard_grad_op", cpu_offload=0.5, wrap_min_params=2000)),
    "compile-2": (2, dict(strategy="full_shard", compile=True, activation_checkpointing="full")),
    "freeze-3": (3, dict(strategy="full_shard", freeze=FREEZE)),
    "empty-4": (4, dict(strategy="full_shard", n_embd=5, n_head=1)),
}


@pytest.fixture(scope="module")
def ranks(tmp):
    """ranks(world) -> the results of all cases at that world size, run once."""
    @functools.cache
    def get(world):
        cases = {}
        for name, (size, keys) in RUNS.items():
            if size == world:
                run = run_compiled if "compile" in keys else run_training
                keys = {**MUON, **two_each(world), **keys}
                cases[name] = run, dict(keys, tmp=tmp, name="muon-" + name)
        cases.update({f"mech-{name}": (case_mechanisms, dict(tmp=tmp, **keys))
                      for name, (size, keys) in MECHANISMS.items() if size == world})
        if world == 2:
            cases["fp16"] = case_overflow, dict(tmp=tmp)
            cases["torch"] = case_torchs_own, dict(tmp=tmp)
        return on_ranks(world, cases)
    return get


def assert_parity(tmp, rows, name, expected):
    assert [r["loss"] for r in rows] == pytest.approx(expected[0], rel=1e-6)
    assert_same_weights(read_ckpt(os.path.join(tmp, name))["model"], expected[1], 1e-5)


def test_muon_parity_single(tmp, plain):
    rows = run_training(tmp, "muon-single", **MUON)
    assert_parity(tmp, rows, "muon-single", plain())


@pytest.mark.parametrize("name", RUNS)
def test_muon_parity_of_strategies(tmp, plain, ranks, name):
    world, keys = RUNS[name]
    theirs = {k: keys[k] for k in ("freeze", "n_embd", "n_head") if k in keys}
    expected = plain(**theirs)
    assert_parity(tmp, values(ranks(world), name)[0], "muon-" + name, expected)


def test_muon_update_rule_is_pytorchs_in_bf16(tmp):
    """Bit for bit, of tall, wide and square matrices; PyTorch's always orthogonalizes in bf16."""
    ours, theirs = (train.build(tiny(tmp, strategy="single", dtype="bfloat16", **MUON), World())[1:]
                    for _ in range(2))
    matrices = [p for name, p in theirs[0].named_parameters() if is_muons(name, p)]
    reference = torch.optim.Muon(matrices, lr=1e-3, weight_decay=0.3, momentum=0.9,
                                 adjust_lr_fn="match_rms_adamw")
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for p, q in zip(ours[0].parameters(), theirs[0].parameters()):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        ours[1].step()
        reference.step()
    weights = dict(ours[0].named_parameters())
    checked = [torch.equal(weights[name], p) for name, p in theirs[0].named_parameters()
               if is_muons(name, p)]
    assert checked == [True] * 12


def test_muon_singular_values_come_close_to_one():
    m = torch.randn(60, 20, generator=torch.Generator().manual_seed(0)) * 1e-4
    for matrix in (m, m.T):
        values = torch.linalg.svdvals(optimizer.orthogonalize(matrix))
        assert 0.6 < values.min() and values.max() < 1.3


def test_muon_takes_what_the_model_says_and_a_stack_is_matrices(tmp):
    """The mixture of experts: not the router; each expert as a matrix of its own. Else 2-D ones."""
    _, moe, opt = train.build(tiny(tmp, model="moe", strategy="single", **MUON), World())
    names = {p: name for name, p in moe.named_parameters()}
    ours = [names[p] for p in opt.param_groups[0]["params"]]
    expected = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc", "mlp.c_proj")
    assert sorted(ours) == [f"transformer.h.{i}.{name}" for i in range(3) for name in expected]
    generator = torch.Generator().manual_seed(0)
    for p in moe.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    stack = moe.blocks[1].mlp.c_fc
    whole = stack.detach().clone()
    opt.step()
    for before, after, grad in zip(whole, stack, stack.grad):
        expert = torch.nn.Parameter(before)
        expert.grad = grad
        plain_muon(expert, torch.zeros_like(grad), 1e-3)
        assert torch.allclose(after, expert, atol=1e-7)
    _, _, opt = train.build(tiny(tmp, strategy="single", freeze=FREEZE, **MUON), World())
    assert all(p.requires_grad for group in opt.param_groups for p in group["params"])
    shares = optimizer.divide([torch.empty(8, 30, 60), *[torch.empty(30, 60)] * 8], 2)
    assert sorted(map(len, shares)) == [1, 8]  # a stack costs what its matrices do


# -----------------------------------------------------------------------------
# mechanisms: who orthogonalizes what, and what is sent and kept

MECHANISMS = {
    "ddp": (3, dict(strategy="ddp")), "full_shard": (3, dict(strategy="full_shard")),
    "bf16": (2, dict(strategy="full_shard", dtype="bfloat16", cpu_offload=1.0)),
    "fp16": (2, dict(strategy="full_shard", dtype="float16")), "hybrid_shard": (4, HYBRID),
}


def built(tmp, **overrides):
    """A run on these ranks after backward, before the optimizer's step."""
    cfg = tiny(tmp, **{**MUON, **overrides})
    world = setup(cfg.device, cfg.backend)
    cfg = resolve(cfg, world)
    wrapped, model, opt = train.build(cfg, world)
    with fsdp.autocast(cfg, world.device):
        loss = wrapped(*loader.Batches(cfg, world).train(0, 0))[1]
    return SimpleNamespace(cfg=cfg, world=world, model=model, optimizer=opt, loss=loss)


def case_mechanisms(tmp, **overrides):
    run = built(tmp, **overrides)
    run.loss.backward()
    sent, shapes = [], []
    all_to_all, orthogonalize = dist.all_to_all_single, optimizer.orthogonalize

    def listen(out, t, *args, **kwargs):
        group = dist.get_world_size(kwargs.get("group"))
        sent.append(["all_to_all", group, t.numel() * t.element_size()])
        return all_to_all(out, t, *args, **kwargs)

    def watch(m):
        shapes.append([*m.shape, str(m.dtype)])
        return orthogonalize(m)

    with (patch.object(dist, "all_to_all_single", listen), CommDebugMode() as comm,
          patch.object(optimizer, "orthogonalize", watch)):
        run.optimizer.step()
    state = {name: run.optimizer.state[p] for name, p in run.model.named_parameters()}
    kept = sum(optimizer.local(t).numel() * 4 for tensors in state.values()
               for t in tensors.values() if t.dim())
    like = [p.placements == run.optimizer.state[p]["momentum_buffer"].placements
            for name, p in run.model.named_parameters() if is_muons(name, p)
            and isinstance(p, DTensor)]
    formula = formulas.traffic(run.model, run.cfg, run.world)
    at_rest = formulas.kept(run.model, run.cfg, run.world)
    return dict(
        counts={str(op).split(".")[1]: n for op, n in comm.get_comm_counts().items()},
        sent=sent, formula=[[*key, n] for key, n in formula.items() if key[0] == "all_to_all"],
        shapes=shapes, like=like, state={name: sorted(tensors) for name, tensors in state.items()},
        kept=kept, kept_formula=sum(memory["optimizer"] for memory in at_rest))


@pytest.mark.parametrize("name", MECHANISMS)
def test_muon_mechanisms(ranks, name):
    """12 matrices, each whole and on one rank only; what is sent and kept is the formula."""
    world, keys = MECHANISMS[name]
    per_rank = values(ranks(world), "mech-" + name)
    dtype = str(torch.bfloat16 if name == "bf16" else torch.float32)
    whole = {(90, 30): 3, (30, 30): 3, (120, 30): 3, (30, 120): 3}
    seen = Counter((*shape[:2], shape[2]) for r in per_rank for shape in r["shapes"])
    assert seen == {(*shape, dtype): n for shape, n in whole.items()}
    for r in per_rank:
        assert sum(r["counts"].values()) == r["counts"]["alltoall_base_"]
        assert r["counts"]["alltoall_base_"] == (1 if name == "ddp" else 2)
        assert 12 // world - 1 <= len(r["shapes"]) <= 12 // world + 1
        assert len(r["like"]) == (0 if name == "ddp" else 12) and all(r["like"])
        assert r["kept"] == r["kept_formula"]
        moved = Counter()
        for kind, n, size in r["sent"]:
            moved[kind, n] += size
        assert moved == {(kind, n): size for kind, n, size in r["formula"]}
        for key, kinds in r["state"].items():
            muons = ".h." in key and key.endswith("weight") and ".ln_" not in key
            assert kinds == (["momentum_buffer"] if muons else ["exp_avg", "exp_avg_sq", "step"])


def case_torchs_own(tmp):
    """The collectives of torch.optim.Muon's step on the same DTensors."""
    run = built(tmp, strategy="full_shard")
    run.loss.backward()
    matrices = [p for name, p in run.model.named_parameters() if is_muons(name, p)]
    with CommDebugMode() as comm:
        torch.optim.Muon(matrices).step()
    return comm.get_total_counts()


def test_muon_sends_less_often_than_pytorchs_own(ranks):
    """At least one gather a product there; 2 all-to-alls here, as tested above."""
    assert values(ranks(2), "torch")[0] >= 12 * 5


def test_muon_divides_the_work_by_cost():
    shapes = [(30, 30), (120, 30), (90, 30), (30, 120)] * 5
    cost = {(30, 30): 3, (90, 30): 7, (120, 30): 9, (30, 120): 9}  # in 30^3 products
    matrices = [torch.empty(shape) for shape in shapes]
    for world in (1, 2, 3, 4, 7, 64):
        shares = optimizer.divide(matrices, world)
        assert sorted(map(id, sum(shares, []))) == sorted(map(id, matrices))
        load = [sum(cost[tuple(m.shape)] for m in share) for share in shares]
        assert max(load) <= max(9, sum(load) / world + 9 / 2)


def case_overflow(tmp):
    """float16: rank 1 alone has an infinite gradient, in one row."""
    run = built(tmp, strategy="full_shard", dtype="float16")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(run.loss).backward()
    fsdp.reshard(run.model)  # so that its parameters are the shards
    before = [optimizer.local(p).clone() for p in run.model.parameters()]
    grad = run.model.blocks[1].mlp.c_fc.weight.grad.to_local()
    saved = grad.clone()
    if run.world.rank == 1:
        grad[0] = math.inf

    def step():
        scaler.unscale_(run.optimizer)
        scaler.step(run.optimizer)
        scaler.update()
        now = [optimizer.local(p) for p in run.model.parameters()]
        return sum(not torch.equal(a, b) for a, b in zip(before, now))

    skipped, scale = step(), scaler.get_scale()
    grad.copy_(saved)
    return skipped, scale, step()


def test_muon_float16_overflow_skips_the_step_on_all_ranks(ranks):
    for skipped, scale, moved in values(ranks(2), "fp16"):
        assert (skipped, scale) == (0, 512.0)
        assert moved > 12


def test_gradient_that_one_rank_lacks_is_refused(tmp):
    gpt, idx = plain_gpt(), torch.zeros(1, 16, dtype=torch.long)
    fourth = [name for name, _ in gpt.named_parameters()][3]
    says = f"^{fourth} gets a gradient on 1 of 2 ranks; let the model add 0 "
    with (patch.object(optimizer, "mean", lambda x, world: x - 0.5 * (torch.arange(len(x)) == 3)),
          pytest.raises(SystemExit, match=says)):
        optimizer.require_gradients(gpt, (idx, idx), tiny(tmp, strategy="ddp"), World(size=2))


# -----------------------------------------------------------------------------
# checkpoints


CHAIN = [  # ranks, strategy, kind of checkpoint
    (2, "full_shard", "full"), (3, "full_shard", "sharded"), (2, "ddp", "sharded"), (1, "", "full")]


def test_muon_checkpoints_at_other_world_sizes_and_strategies(tmp):
    whole, chain = os.path.join(tmp, "muon-whole"), os.path.join(tmp, "muon-chain")
    launch(1, arguments(tmp, whole, max_iters=8, **MUON))
    for i, (world, strategy, kind) in enumerate(CHAIN):
        run = dict(strategy=strategy, checkpoint=kind, init_from="auto", max_iters=2 * (i + 1))
        launch(world, arguments(tmp, chain, **run, **MUON))
    assert losses(chain) == pytest.approx(losses(whole), rel=1e-5)
    assert_same_weights(read_ckpt(chain)["model"], read_ckpt(whole)["model"], 1e-4)


def test_muon_resume_is_bitwise(tmp):
    """From a sharded checkpoint in the middle; dropout is on."""
    whole, parts = (os.path.join(tmp, "muon-resume-" + name) for name in ("whole", "parts"))
    run = dict(dropout=0.1, gradient_accumulation_steps=2, **MUON)
    launch(2, arguments(tmp, whole, max_iters=8, **run))
    launch(2, arguments(tmp, parts, max_iters=4, checkpoint="sharded", **run))
    launch(2, arguments(tmp, parts, max_iters=8, init_from="resume", **run))
    assert losses(parts) == losses(whole) and len(losses(whole)) == 8
    a, b = (checkpoint.open_full(os.path.join(out, "ckpt.pt")) for out in (whole, parts))
    assert a.header["shapes"] == b.header["shapes"]
    assert len([key for key in a.header["shapes"] if key.startswith("momentum_buffer.")]) == 12
    for key in a.header["shapes"]:
        assert torch.equal(a.get(key), b.get(key)), key


def test_muon_resume_with_the_other_optimizer_is_one_clear_line(tmp):
    out = os.path.join(tmp, "muon-only")
    launch(1, arguments(tmp, out, max_iters=1, **MUON))
    p = trained(1, arguments(tmp, out, max_iters=2, init_from="resume"))
    assert p.returncode == 1
    assert p.stderr.strip() == (
        f"optimizer=adamw in this run, but {out}/ckpt.pt has optimizer=muon; pass "
        "--optimizer=muon, or another out_dir or init_from")
    nanogpts = SimpleNamespace(path="ckpt.pt", header=dict(config={}, model_args={}))
    with pytest.raises(SystemExit, match="pass --optimizer=adamw, or another out_dir"):
        checkpoint.compare(nanogpts, tiny(tmp, **MUON))


# -----------------------------------------------------------------------------
# an optimizer of one's own, whose state has other shapes than its parameters


class Factored(torch.optim.Optimizer):
    """Rows' sizes as a DTensor; of a matrix its square, which every rank has whole; a count."""

    def __init__(self, model, cfg, fault=None):
        super().__init__(model.parameters(), dict(lr=cfg.learning_rate))
        self.fault = fault

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state, grad = self.state[p], p.grad
                if not state:
                    state["count"] = torch.zeros((), dtype=torch.int64)
                    state["rows"] = torch.zeros_like(grad.flatten(1).sum(1) if p.dim() > 1 else p)
                    if p.dim() > 1:
                        state["square"] = torch.zeros(p.shape[1], p.shape[1])
                state["count"] += 1
                state["rows"].add_(grad.square().flatten(1).sum(1) if p.dim() > 1 else grad**2)
                if p.dim() > 1:
                    whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
                    state["square"].add_(whole.T @ whole)
                    scale = (state["rows"] + state["square"].trace()).sqrt()[:, None]
                else:
                    scale = state["rows"].sqrt()
                p.sub_(grad / (scale + 1e-3), alpha=group["lr"])
                if self.fault == "number":
                    state["count"] = 1
                elif self.fault == "local" and p.dim() > 1:
                    rows = optimizer.local(grad)
                    state["square"].copy_(rows.T @ rows)
                elif self.fault == "digits" and p.dim() > 1:
                    state["square"].mul_(1 + 1e-6 * dist.get_rank())
                elif self.fault == "placed" and isinstance(p, DTensor):
                    state["rows"] = state["rows"].redistribute(placements=[Replicate()])


OWN = dict(max_iters=6, learning_rate=0.05, warmup_iters=0, gradient_accumulation_steps=6)


def case_own(tmp, name, copies=(), fault=None, **keys):
    """Losses of a run with Factored; copies of what it leaves."""
    with patch.object(train, "make_optimizer", partial(Factored, fault=fault)):
        rows = run_training(tmp, name, **keys)
    if dist.is_initialized():
        dist.barrier()
        for copy in copies if dist.get_rank() == 0 else ():
            shutil.copytree(os.path.join(tmp, name), os.path.join(tmp, copy))
        dist.barrier()
    return [row["loss"] for row in rows]


@pytest.fixture(scope="module")
def own(tmp):
    """{name: losses on each rank} at 2 ranks, then at 3, of what 2 have left."""
    run, at_2, at_3 = dict(tmp=tmp, **OWN), {}, {}
    at_2["whole"] = case_own, dict(run, name="own-whole")
    for kind in ("full", "sharded"):
        name, more = f"own-{kind}", dict(checkpoint=kind)
        copies = [f"{name}-{world}" for world in (1, 3)]
        half = dict(run, name=name, copies=copies, **more)
        at_2[f"{kind} half"] = case_own, {**half, "max_iters": 3}
        more["init_from"] = "resume"
        at_2[kind] = case_own, dict(run, name=name, **more)
        at_3[f"{kind} at 3"] = case_own, dict(run, name=f"{name}-3", **more)
    for fault in ("number", "local", "placed", "digits"):
        at_2[fault] = case_own, dict(run, name=f"own-{fault}", fault=fault, eval_interval=1)
    return {**on_ranks(2, at_2), **on_ranks(3, at_3)}


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_own_state_of_any_shape_is_saved_and_resharded(tmp, own, kind):
    whole = values(own, "whole")[0]
    assert whole[-1] < whole[0] - 0.01
    assert values(own, kind)[0] == whole
    assert values(own, f"{kind} at 3")[0] == pytest.approx(whole, rel=1e-6)
    single = case_own(tmp, f"own-{kind}-1", init_from="resume", checkpoint=kind, **OWN)
    assert single == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("fault, kind", [
    ("number", "count"), ("local", "square"), ("placed", "rows")])
def test_own_state_that_cannot_be_resharded_is_refused_at_the_first_save(own, fault, kind):
    for rank in own[fault]:
        wrong = "is no DTensor, and differs between ranks"
        if fault != "local":
            wrong = "is no tensor placed as transformer.wte.weight"
        assert rank["error"] == f"{kind}.transformer.wte.weight {wrong}: see optimizer.py"
    values(own, "digits")  # GPUs of two kinds: saved, as the last digits are nobody's fault


def test_own_state_is_in_the_plan(tmp):
    rehearse = pytest.importorskip("rehearse")
    cfg = resolve(tiny(tmp, strategy="single"), World())
    with patch.object(rehearse, "make_optimizer", Factored):
        timeline, marks, _ = rehearse.rehearse(cfg, World())
    shapes = [p.shape for p in plain_gpt().parameters()]
    expected = sum(8 + 4 * shape[0] for shape in shapes)
    expected += sum(4 * shape[1]**2 for shape in shapes if len(shape) > 1)
    assert timeline[marks[0][0]][rehearse.KINDS.index("optimizer")] == expected
