"""
Where a run starts: from scratch, from a checkpoint, or from a model in Hugging Face's format.

    source, resumed = open_start(cfg, world)  # a checkpoint.Source; None: from scratch
    cfg = final_config(cfg, source, resumed, world)  # with the source's sizes

init_from=resume and auto continue the run in out_dir. Any other source only gives its weights to
a new run.
"""

from dataclasses import replace

import checkpoint
import configurator
from data.loader import data_dir, read_meta
from ranks import print0


def open_start(cfg, world):
    """Open the run's starting point (all ranks). Returns (source, resumed): source is None when
    starting from scratch; resumed is True if the run continues, False if it only takes the
    weights."""
    if cfg.init_from == "scratch":
        return None, False
    if cfg.init_from not in ("resume", "auto"):
        return open_weights(cfg.init_from, world, cfg.dataset), False
    source = checkpoint.find(cfg.out_dir, world)
    if source is None:
        line = f"init_from={cfg.init_from}: no checkpoint in out_dir={cfg.out_dir}"
        if cfg.init_from == "resume":
            raise SystemExit(line)
        print0(world, f"{line}, so this is a new run, from random weights")
    return source, source is not None


def open_weights(name, world, dataset=None):
    """The weights of another run's out_dir, or of a model in Hugging Face's format (all ranks).
    dataset: the data to train on; its tokenizer must be that of Hugging Face's model."""
    source = checkpoint.find(name, world)
    if source:
        if dataset:
            require_same_tokens(source, dataset)
        return checkpoint.for_new_run(source)
    return configurator.named_file("huggingface").open_weights(name, world, dataset)


def final_config(cfg, source, resumed, world):
    """cfg with the source's model sizes, or the vocabulary size of the data (all ranks). SystemExit
    if a file or a flag contradicts the sizes. When resuming, prints other differences."""
    if source:
        theirs = source.header["config"]
        sizes = source.header["model_args"]
        # A new run keeps its own block_size if that is shorter: it saves memory.
        cfg = configurator.with_sizes(
            cfg, theirs["model"], sizes, source.path, whole_context=resumed)
    if resumed:
        require_same_tokens(source, cfg.dataset)
        # A flag that was forgotten deletes nothing that the run has kept.
        keeps = {"keep_checkpoints", "always_save_checkpoint"}.difference(cfg.given)
        cfg = replace(cfg, **{key: theirs[key] for key in keeps if key in theirs})
        for key, value in configurator.as_dict(cfg).items():
            old = sizes.get(key, theirs.get(key, value))
            if old != value and key != "init_from":
                is_order = key in "batch_size gradient_accumulation_steps block_size seed".split()
                note = "; text is skipped or comes again" if is_order else ""
                if key == "dataset":
                    note = "; the best validation loss begins anew"
                    source.header["best_val_loss"] = 1e9
                if key == "loss_scale":
                    source.header["scaler"] = None
                print0(world, f"{key}={value!r} now, and {old!r} in {source.path}{note}")
    if source is None:
        cfg = with_vocabulary(cfg)
    return with_base(cfg, world, resumed)


def require_same_tokens(source, dataset):
    """SystemExit if the data's meta.json and that of the source's run name different tokens, as far
    as they name them."""
    metas = read_meta(data_dir(dataset)), source.header.get("meta") or {}
    kinds = {"".join(meta.get("chars", "")) or meta.get("tokenizer", "") for meta in metas}
    kinds = {kind.replace("tokenizer.json", "gpt2") for kind in kinds}  # GPT-2's may be a file too
    crcs = {meta.get("vocab_crc") for meta in metas}
    if len(kinds - {""}) > 1 or len(crcs - {None}) > 1:
        raise SystemExit(f"dataset={dataset} has another tokenizer than the data of {source.path}")


def with_base(cfg, world, resumed):
    """cfg. If its model file has an open_base, as LoRA's has, that opens its base first, and cfg
    has the base's sizes (all ranks). resumed: False for a new run, which will move an earlier run
    out of cfg.out_dir."""
    open_base = getattr(configurator.model_file(cfg.model), "open_base", None)
    return open_base(cfg, world, resumed) if open_base else cfg


def with_vocabulary(cfg):
    """cfg with the vocabulary size of its data, if meta.json has one, and no file or flag has set
    another."""
    size = read_meta(data_dir(cfg.dataset)).get("vocab_size")
    if size is None or "vocab_size" in cfg.given:
        return cfg
    return replace(cfg, sizes=replace(cfg.sizes, vocab_size=size))
