"""
moe.py against experts that are asked token by token. What every model must do is in
test_contract.py.

    python -m pytest -q extras/tests/test_moe.py
"""

import pytest
import torch
from torch.nn import functional as F
from training import plain_model, tiny

from extras.lora import Keys, adapt


@pytest.mark.parametrize("n_expert, n_active", [(4, 2), (5, 1), (3, 3)])
def test_moe_asks_the_best_experts_of_each_token(tmp, n_expert, n_active):
    cfg = tiny(tmp, model="moe", n_expert=n_expert, n_active=n_active)
    experts = plain_model(cfg).blocks[1].mlp
    experts.router.weight.data.normal_()
    x = torch.randn(2, 16, 30)
    answer, unbalanced = experts(x)
    chances = (x @ experts.router.weight.T).softmax(-1)
    asked = torch.zeros(n_expert)
    for token, chance, got in zip(x.view(32, 30), chances.view(32, -1), answer.view(32, 30)):
        expected = torch.zeros(30)
        for e in chance.argsort(descending=True)[:n_active]:
            y = experts.c_proj[e] @ F.gelu(experts.c_fc[e] @ token)
            expected += chance[e] * y
            asked[e] += 1
        assert torch.allclose(got, expected, atol=1e-5)
    balance = n_expert * (asked / asked.sum() * chances.mean((0, 1))).sum()
    assert unbalanced.item() == pytest.approx(balance.item(), rel=1e-5)
    x = x.bfloat16()  # the experts are chosen in fp32 all the same
    with torch.autocast("cpu", torch.bfloat16):
        assert experts(x)[1].item() == experts(x.float())[1].item()
    # a busy expert's chance is pushed down
    pushed, expected = (torch.autograd.grad(loss, experts.router.weight, retain_graph=True)[0]
                        for loss in (unbalanced, balance))
    assert torch.allclose(pushed, expected, rtol=1e-3, atol=1e-7)
    experts.router.weight.data.zero_()
    assert experts(x.float())[1].item() == pytest.approx(1)  # all chances are equal


def test_moe_initial_values_are_smaller_at_the_ends_of_residual_branches(tmp):
    model = plain_model(tiny(tmp, model="moe", n_expert=8))
    for name, p in model.blocks[1].mlp.named_parameters():
        std = 0.02 / 6**0.5 if name == "c_proj" else 0.02
        assert abs(p.std().item() / std - 1) < 0.1, name


def test_moe_loss_in_training_has_the_blocks_mean_imbalance_as_its_second_term(tmp):
    idx, losses = torch.arange(32).view(2, 16), []
    for balance in (0.0, 0.5):
        model = plain_model(tiny(tmp, model="moe", balance=balance)).train()
        seen = []
        for block in model.blocks:
            block.register_forward_hook(lambda _, __, out, seen=seen: seen.append(out[1].item()))
        losses.append(model(idx, idx)[1].item())
        assert model.eval()(idx, idx)[1].item() == losses[0]  # an evaluation has the first alone
    assert losses[1] - losses[0] == pytest.approx(0.5 * sum(seen) / len(seen), rel=1e-4)


def test_moe_every_adapter_of_lora_trains(tmp):
    """The router, a layer that is not nn.Linear, has none."""
    model = plain_model(tiny(tmp, model="moe"))
    adapt(model, Keys())
    for name, p in model.named_parameters():
        p.requires_grad_(".lora_" in name)
    idx = torch.arange(32).view(2, 16)
    model(idx, idx)[1].backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without and not hasattr(model.blocks[0].mlp.router, "lora_A")
