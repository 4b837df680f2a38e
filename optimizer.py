"""
What turns gradients into steps: AdamW's parameter groups and the learning-rate schedule.

    optimizer = make_optimizer(model, cfg)   # after sharding, before the first forward
    lr = learning_rate_at(step, cfg)
"""

import math

import torch


def make_optimizer(model, cfg):
    """
    AdamW over the trainable parameters: matrices and embeddings decay, vectors do not (nanoGPT's
    two groups, in its order). Each rank updates its rows: the update must be elementwise. Call it
    before any forward, which would leave gathered copies as the root's parameters.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    # fused: one kernel, where the other variants make a dozen temporaries as large as the model
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=cfg.learning_rate,
                             betas=(cfg.beta1, cfg.beta2), fused=True)


def learning_rate_at(step, cfg):
    """Linear warm-up to learning_rate, cosine to min_lr at lr_decay_iters, then min_lr."""
    if not cfg.decay_lr:
        return cfg.learning_rate
    if step < cfg.warmup_iters:
        return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
    if step >= cfg.lr_decay_iters:
        return cfg.min_lr
    progress = (step - cfg.warmup_iters) / (cfg.lr_decay_iters - cfg.warmup_iters)
    return cfg.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (cfg.learning_rate - cfg.min_lr)
