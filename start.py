"""
Where a run starts: from scratch, from a checkpoint, or from a model in Hugging Face's format.

    source, resumed = open_start(cfg, world)         # a checkpoint.Source; None: from scratch
    cfg = final_config(cfg, source, resumed, world)  # with the source's sizes

init_from=resume and auto continue the run in out_dir. Any other source only gives its weights to
a new run. A LoRA checkpoint names its base, which is opened as a second source.
"""

import sys
from dataclasses import replace

import checkpoint
import configurator
from configurator import extra
from data.loader import data_dir, read_meta
from ranks import from_rank0, print0


def open_start(cfg, world):
    """Open the run's starting point (all ranks). Returns (source, resumed): source is None when
    starting from scratch; resumed is True if the run continues, False if it only takes the
    weights."""
    source = open_source(cfg, world)
    resumed = source is not None and cfg.init_from in ("resume", "auto")
    if source is None and cfg.init_from == "resume":
        raise SystemExit(
            f"init_from=resume: no checkpoint in out_dir={cfg.out_dir}; use scratch, or "
            "auto to resume only if there is one")
    if cfg.lora_rank:
        extra("lora", wanted_by=f"lora_rank={cfg.lora_rank}")
        source = with_base(source, resumed, cfg, "lora_rank")
    if source and source.base and not resumed:
        checkpoint.require_base_outside(cfg.out_dir, source.header["base"])
    return source, resumed


def with_base(source, resumed, cfg, key):
    """For a run with adapters, such as LoRA's, by this key: the source if it holds them; else one
    that has it as the base of new ones."""
    if source is None:
        raise SystemExit(
            f"{key}={getattr(cfg, key)}: it needs a base; pass --init_from=DIR, a hub name or "
            "another run's out_dir")
    if source.base:
        return source
    if resumed:  # a run without adapters
        off = getattr(configurator.Config, key)
        configurator.refuse(key, getattr(cfg, key), off, source.path)
    return checkpoint.on_base(source, cfg.init_from)


def open_source(cfg, world):
    """Open the checkpoint or model that cfg.init_from names (all ranks). None for scratch, or if
    there is no checkpoint."""
    if cfg.init_from == "scratch":
        return None
    if cfg.init_from not in ("resume", "auto"):
        return open_weights(cfg.init_from, world, "init_from")
    source = checkpoint.find(cfg.out_dir, world)
    if source:
        open_base(source, world)
    return source


def open_weights(name, world, wanted_by):
    """The weights of another run's out_dir, or of a model in Hugging Face's format.
    wanted_by: where the name came from, for error lines."""
    source = checkpoint.find(name, world)
    if source:
        source = checkpoint.weights_only(source)
    else:
        huggingface = extra("huggingface", wanted_by=f"{wanted_by}={name}")
        # Rank 0 downloads it, and then every rank opens the copy in its own node's cache.
        path = from_rank0(world, lambda: huggingface.open_pretrained(name, wanted_by).path)
        source = huggingface.open_pretrained(path, wanted_by)
    open_base(source, world)
    return source


def open_base(source, world):
    """If the source holds LoRA's matrices, open the model that they adapt."""
    base = source.header.get("base")
    if not base:
        return
    source.base = open_weights(base, world, f"{source.path}: base")
    before = source.header.get("base_origin")
    now = source.base.header.get("origin", "something else")
    if before and before != now:
        print0(world, f"{source.path}: base={base} was {before} when LoRA began, "
                      f"and is now {now}", file=sys.stderr)


def final_config(cfg, source, resumed, world):
    """cfg with the source's model sizes, or the vocabulary size of the data. SystemExit if a file
    or a flag contradicts them. When resuming, prints other differences."""
    if source is None:
        return with_vocabulary(cfg)
    # Defaults for checkpoints that lack these keys: older ones, nanoGPT's, Hugging Face's.
    theirs = {
        "model": "gpt2", "optimizer": "adamw", "lr_schedule": "cosine", **source.header["config"]}
    sizes = source.header["model_args"]
    # A new run keeps its own block_size if that is shorter: it saves memory.
    cfg = configurator.with_sizes(
        cfg, theirs["model"], sizes, source.path, whole_context=resumed)
    if resumed:
        if cfg.optimizer != theirs["optimizer"]:
            configurator.refuse("optimizer", cfg.optimizer, theirs["optimizer"], source.path)
        changed = configurator.differences({**theirs, **sizes}, cfg)
        if changed:
            print0(world, f"this run differs from the run of {source.path}: {', '.join(changed)}")
    return cfg


def with_vocabulary(cfg):
    """cfg with the vocabulary size of its data, if meta.json has one; SystemExit if a file or a
    flag set another."""
    ours = cfg.sizes.vocab_size
    size = read_meta(data_dir(cfg.dataset)).get("vocab_size", ours)
    if "vocab_size" in cfg.given and ours != size:
        raise SystemExit(
            f"vocab_size={ours}, but dataset={cfg.dataset} has {size} symbols; pass "
            f"--vocab_size={size}, or another --dataset")
    return replace(cfg, sizes=replace(cfg.sizes, vocab_size=size))
