"""
AdamW's groups, the learning rate, and an optimizer of one's own, whose state has other shapes than
its parameters. AdamW's numbers are tested in test_fsdp.py.

    python -m pytest -q tests/test_optimizer.py
"""

import itertools
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from harness import on_ranks, values
from torch.distributed.tensor import DTensor
from training import plain_gpt, read_ckpt, read_metrics, run_training, tiny

import fsdp
import train
from configurator import Config
from optimizer import LossScaler, learning_rate_at, make


def test_optimizer_groups_are_nanogpts(tmp):
    """Matrices and embeddings decay, vectors do not, nor does a marked matrix; what is frozen is in
    neither."""
    gpt = plain_gpt()
    marked = "transformer.h.0.mlp.c_fc.weight"
    gpt.get_parameter(marked)._no_weight_decay = True
    train.freeze(gpt, r"wpe|h\.1\.")
    optimizer = make(gpt, tiny(tmp, weight_decay=0.3, beta1=0.8, beta2=0.9))
    names = {p: name for name, p in gpt.named_parameters()}
    left = [n for n in names.values() if "wpe" not in n and ".h.1." not in n]
    vectors = [n for n in left if n.endswith("bias") or ".ln_" in n or n == marked]
    groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    assert groups == [[n for n in left if n not in vectors], vectors]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert all(group["betas"] == (0.8, 0.9) for group in optimizer.param_groups)


@pytest.mark.parametrize("lr_schedule, expected", [
    # of 100 steps, after a warm-up over 2; from 0 to 1 of the way from min_lr
    ("cosine", {2: 1.0, 51: 0.5, 100: 0.0, 1000: 0.0}),
    ("linear", {2: 1.0, 51: 0.5, 76: 24 / 98, 99: 1 / 98, 100: 0.0, 1000: 0.0}),
    ("wsd", {2: 1.0, 80: 1.0, 85: 0.75, 90: 0.5, 99: 0.05, 100: 0.0, 1000: 0.0}),
    ("constant", {2: 1.0, 80: 1.0, 99: 1.0, 100: 1.0, 1000: 1.0}),
])
def test_optimizer_schedules_of_the_learning_rate(tmp, lr_schedule, expected):
    """More of the cosine is in the RATES of training.py, which test_fsdp.py's runs have."""
    keys = dict(learning_rate=1e-3, min_lr=1e-4, warmup_iters=2, lr_decay_iters=100)
    cfg = tiny(tmp, lr_schedule=lr_schedule, **keys)
    # the first step learns too
    assert learning_rate_at(0, cfg) == 1e-3 / 3 and learning_rate_at(1, cfg) == 2e-3 / 3
    rates = {step: learning_rate_at(step, cfg) for step in expected}
    assert rates == pytest.approx({n: 1e-4 + 9e-4 * share for n, share in expected.items()})
    # if it ends with the warm-up, no step decays
    assert learning_rate_at(2, replace(cfg, lr_decay_iters=2)) == rates[1000]
    # decay_lr=False is nanoGPT's, whatever the schedule is: constant from the first step on
    constant = replace(cfg, decay_lr=False)
    assert [learning_rate_at(step, constant) for step in (0, 1000)] == [1e-3] * 2


def test_optimizer_loss_scaler_is_pytorchs(monkeypatch):
    """torch.amp.GradScaler beside it: scale, growth, skipped steps, and the weights."""
    monkeypatch.setattr(LossScaler, "GROW_AFTER", 3)
    ours, theirs = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    cfg = Config(dtype="float16", loss_scale=1024.0)
    scaler, reference = LossScaler(cfg), torch.amp.GradScaler(
        "cpu", init_scale=1024.0, growth_interval=3)
    sgd, their_sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs)]
    scales = []
    for step in range(14):
        x = torch.randn(4, 5) * (1e38 if step in (2, 3, 9) else 1.0)
        (ours(x).square().mean() * scaler.scale).backward()
        norm = fsdp.clip_grad_norm(ours, 0.5, scaler.scale)
        if scaler.accepts(norm):
            sgd.step()
        sgd.zero_grad()

        reference.scale(theirs(x).square().mean()).backward()
        reference.unscale_(their_sgd)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        reference.step(their_sgd)
        reference.update()
        their_sgd.zero_grad()
        assert scaler.scale == reference.get_scale()
        assert torch.allclose(ours.weight, theirs.weight, rtol=1e-6, atol=0)
        scales.append(scaler.scale)
    assert len(set(scales)) == 3
    state = reference.state_dict()
    assert scaler.state_dict() == {key: state[key] for key in ("scale", "_growth_tracker")}


# -----------------------------------------------------------------------------
# an optimizer of one's own


class Factored(torch.optim.Optimizer):
    """Rows' sizes as a DTensor; of a matrix its columns', which every rank has whole; a count; and
    in the group numbers that say how far a step goes, as Prodigy and schedule-free AdamW have."""
    eps = 1e-3

    def __init__(self, model, cfg):
        keys = dict(lr=cfg.learning_rate, weight_decay=cfg.weight_decay)
        super().__init__(model.parameters(), dict(keys, eps=self.eps, k=0, total=0.0))

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        group["k"] += 1
        group["total"] += group["k"] / 3
        for p in group["params"]:
            state, grad, matrix = self.state[p], p.grad, p.dim() > 1
            of_rows = grad.square().flatten(1).sum(1) if matrix else grad**2
            if not state:
                state["count"] = torch.zeros((), dtype=torch.int64)
                state["rows"] = torch.zeros_like(of_rows)
                if matrix:
                    state["columns"] = torch.zeros(p.shape[1])
            state["count"] += 1
            state["rows"] += of_rows
            scale = state["rows"].sqrt()
            if matrix:
                whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
                state["columns"] += whole.square().sum(0)
                scale = (state["rows"] + state["columns"].sum()).sqrt()[:, None]
            p.sub_(grad / (scale + group["eps"]), alpha=group["lr"] / group["total"])


def case_own(tmp, name, **keys):
    """Losses of a run with Factored."""
    own = dict(learning_rate=0.05, warmup_iters=0, gradient_accumulation_steps=6)
    with patch.object(train, "make_optimizer", Factored):
        return [row["loss"] for row in run_training(tmp, name, **{**own, **keys})]


def test_own_state_of_any_shape_is_saved_and_resharded(tmp):
    """Two steps on 2 ranks, two more on 3, and two more in this process; by both kinds of
    checkpoint."""
    whole = case_own(tmp, "own-whole", max_iters=6)
    assert whole[-1] < whole[0] - 0.01
    runs = {kind: dict(tmp=tmp, name=f"own-{kind}", checkpoint=kind, init_from="auto")
            for kind in ("full", "sharded")}
    for world, end in ((2, 2), (3, 4)):
        results = on_ranks(world, {kind: (case_own, dict(run, max_iters=end))
                                   for kind, run in runs.items()})
        for kind in runs:
            values(results, kind)
    for run in runs.values():
        assert case_own(**run, max_iters=6) == pytest.approx(whole, rel=1e-6)
    # What a key or the code sets is not the checkpoint's.
    with patch.object(Factored, "eps", 1e-4):
        case_own(**dict(run, checkpoint="full"), max_iters=7, weight_decay=0.5)
    [group] = read_ckpt(f"{tmp}/{run['name']}")["param_groups"]
    assert (group["weight_decay"], group["eps"], group["k"]) == (0.5, 1e-4, 7)
    # Nor does a number of the code come back that the checkpoint had.
    case_own(**dict(run, checkpoint="full"), max_iters=8)
    [group] = read_ckpt(f"{tmp}/{run['name']}")["param_groups"]
    assert (group["weight_decay"], group["eps"], group["k"]) == (0.1, 1e-3, 8)


def test_own_groups_have_learning_rates_of_their_own(tmp):
    """Half as fast is what is written; a group without lr_scale takes the run's."""
    seen = []

    def make(model, cfg):
        head, *others = model.parameters()
        groups = [dict(params=[head], lr_scale=0.5), dict(params=others)]
        optimizer = torch.optim.SGD(groups, lr=1.0)
        optimizer.register_step_pre_hook(
            lambda *args: seen.append([group["lr"] for group in optimizer.param_groups]))
        return optimizer

    with patch.object(train, "make_optimizer", make):
        run_training(tmp, "scales", max_iters=2, learning_rate=0.1, decay_lr=False)
    assert seen == [[0.05, 0.1]] * 2


def test_own_optimizer_of_another_models_parameters_is_refused(tmp):
    def make(model, cfg):
        return torch.optim.SGD(plain_gpt().parameters())

    with patch.object(train, "make_optimizer", make), pytest.raises(ValueError, match="model's"):
        run_training(tmp, "foreign")


def with_state(of):
    """What makes an SGD that keeps of(p, step) of each parameter, {name: value}, from step 1 on."""
    def make(model, cfg):
        optimizer = torch.optim.SGD(model.parameters())
        taken = itertools.count(1)

        def keep(*args):
            step = next(taken)
            for p in model.parameters():
                optimizer.state[p].update(of(p, step))

        optimizer.register_step_post_hook(keep)
        return optimizer

    return patch.object(train, "make_optimizer", make)


def a_number(p, step):
    return dict(seen=step)


def own_rows(p, step):
    return dict(mean=p.detach().to_local().clone())


def blocks_of_rows(p, step):
    """As 8-bit optimizers keep them: a scale for each block of a rank's numbers, here the first."""
    return dict(scales=p.detach().to_local().flatten()[:10].sum().view(1))


def case_refused(tmp, of):
    """What is said to a run with this state."""
    with with_state(of), pytest.raises(ValueError) as e:
        run_training(tmp, of.__name__, strategy="full_shard")
    return str(e.value)


def test_own_state_that_no_checkpoint_can_hold_is_refused_in_the_first_step(tmp):
    """Not at the first save, hours later. A rank's rows, resumed, would be another rank's, or be
    taken for the whole."""
    words = {a_number: ["'seen'", "a tensor: 1"], own_rows: ["'mean'", "torch.zeros_like(p)"],
             blocks_of_rows: ["'scales'", "differs between ranks"]}
    results = on_ranks(2, {of.__name__: (case_refused, dict(tmp=tmp, of=of)) for of in words})
    for of, said in words.items():
        zero, one = values(results, of.__name__)
        assert zero == one and all(word in zero for word in ["transformer.wte.weight", *said])
        rows = read_metrics(f"{tmp}/{of.__name__}")
        assert [row["iter"] for row in rows] == [0]  # the evaluation before
