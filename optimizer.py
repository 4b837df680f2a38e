"""
From gradients to steps: AdamW, the learning rate, and float16's loss scale.

    optimizer = make(model, cfg)   # AdamW: after sharding, before any forward
    lr = learning_rate_at(step, cfg)
    scaler = LossScaler(cfg)

AdamW (Loshchilov and Hutter 2019) keeps two moments, m and v, for each weight w. With its
gradient g, learning rate lr and weight decay d, step t = 1, 2, ... is
    w = w - lr * d * w
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g^2
    w = w - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + 1e-8)
Each element needs only its own g, m and v, so each rank updates its rows by itself.

To use your own, write NAME.py with a function make(model, cfg) that returns any
torch.optim.Optimizer, and pass --optimizer=NAME. Each step sets every group's "lr", times its
"lr_scale" if it has one. Before a checkpoint is loaded, step() is called once with lr 0 and
gradients of zero: it must not change the weights. In a sharded run a parameter p and its gradient
are DTensors, and this rank has some of their rows.
Checkpoints keep self.state[p]: named tensors that all exist after the first step; a step count must
be a tensor too. State that belongs to p's rows (shaped like p, or one number per row) must be a
DTensor placed like p, such as torch.zeros_like(p). Any other tensor must be the same on all ranks.
Then the run can resume at another world size. Numbers in a group, such as Prodigy's d, are kept
too, if the optimizer has changed them since it was made.
"""

import math

import torch


def make(model, cfg, params=None):
    """AdamW with nanoGPT's two groups, in its order: matrices and embeddings decay, vectors
    do not, nor do those with Mamba's mark, `p._no_weight_decay = True`. params: instead of all."""
    trained = [p for p in (model.parameters() if params is None else params) if p.requires_grad]
    decayed = {p for p in trained if p.dim() >= 2 and not getattr(p, "_no_weight_decay", False)}
    groups = [
        {"params": [p for p in trained if p in decayed], "weight_decay": cfg.weight_decay},
        {"params": [p for p in trained if p not in decayed], "weight_decay": 0.0},
    ]
    # fused is one kernel; the other variants make a dozen temporaries as large as the model.
    return torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2), fused=True)


def learning_rate_at(step, cfg):
    """Linear warm-up to learning_rate, then cfg.lr_schedule: to min_lr at lr_decay_iters, or
    constant."""
    if not cfg.decay_lr:
        return cfg.learning_rate
    if step < cfg.warmup_iters:
        return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
    if cfg.lr_schedule == "constant":
        return cfg.learning_rate
    if step >= cfg.lr_decay_iters:
        return cfg.min_lr
    progress = (step - cfg.warmup_iters) / (cfg.lr_decay_iters - cfg.warmup_iters)
    shares = {
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - progress,
        "wsd": min(1.0, 5 * (1 - step / cfg.lr_decay_iters)),  # decay in the last fifth
    }
    return cfg.min_lr + shares[cfg.lr_schedule] * (cfg.learning_rate - cfg.min_lr)


class LossScaler:
    """In float16 small gradients would be rounded to 0. So the loss is multiplied by `scale`, and
    clip_grad_norm divides the gradients by it. If one overflows, all ranks skip the step and halve
    the scale; after GROW_AFTER good steps they double it.

    It replaces torch.amp.GradScaler, which copies its scale asynchronously: with cpu_offload the
    CPU would read it too soon. Here it is a number on the host."""

    GROW_AFTER = 2000  # good steps

    def __init__(self, cfg):
        self.enabled = cfg.dtype == "float16"
        self.scale = cfg.loss_scale if self.enabled else 1.0
        self.good_steps = 0  # since the scale last changed

    def accepts(self, norm):
        """True if the optimizer may take its step. norm: the gradient norm over all ranks."""
        if not self.enabled:
            return True
        is_finite = math.isfinite(norm)  # synchronization point
        self.good_steps += 1
        if not is_finite or self.good_steps == self.GROW_AFTER:
            self.scale *= 2 if is_finite else 0.5
            self.good_steps = 0
        return is_finite

    def state_dict(self):
        """For a checkpoint, under GradScaler's names."""
        return dict(scale=self.scale, _growth_tracker=self.good_steps) if self.enabled else {}

    def load_state_dict(self, state):
        if self.enabled and state:
            self.scale = state["scale"]
            self.good_steps = state["_growth_tracker"]


def allocate_state(optimizer):
    """Create the state of all parameters, for a checkpoint to fill. PyTorch creates it in the
    first step, so take one with zero gradients and learning rate 0: the weights don't change.
    (Each step of a run sets the learning rate.)"""
    grads = {}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for p in group["params"]:
            if p.requires_grad:
                grads[p] = p.grad
                p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, grad in grads.items():
        p.grad = grad  # the same tensor: under DDP it is a view of a bucket
