"""
Sample text from a trained model.

    python sample.py --out_dir=out-quickstart                    # its newest checkpoint
    python sample.py --out_dir=out-quickstart --start='def ' --num_samples=3
    python sample.py --init_from=gpt2 --start=FILE:prompt.txt    # or a hub name, a directory
    echo 'import os' | python sample.py --out_dir=out-quickstart --start=FILE:/dev/stdin

A sample does not stop at an end of text: the model goes on with another text.
"""

import inspect
import math
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import torch
from torch.nn import functional as F

from configurator import DTYPES, load_config, resolve, with_sizes
from data.loader import data_dir, read_meta
from data.tokenizer import tokenizer
from fsdp import autocast
from ranks import World, pick_device, run
from start import open_start, require_same_tokens, with_base
from train import meta_model, parallelize, set_values


class KVCache:
    """The keys and values that one block has computed, (B, nh, length, hs) each."""

    length = 0

    def extend(self, k, v):
        if self.length:
            k = torch.cat((self.k, k), dim=2)
            v = torch.cat((self.v, v), dim=2)
        self.k = k
        self.v = v
        self.length = k.size(2)
        return k, v


@torch.no_grad()
def generate(
    model, idx, max_new_tokens, temperature=1.0, top_k=None, vocab_size=None, generator=None
):
    """Continue idx (B, T) by sampled tokens; returns (B, T + max_new_tokens).

    vocab_size: the tokenizer's own size, so that the vocabulary's padding is never drawn.
    A full context restarts from its last half: positions are absolute, so a sliding window would
    invalidate the cache at every token. Under FSDP every rank must call it, with the same idx and
    generators in the same state: each forward gathers.
    """
    limit = model.config.block_size
    takes_cache = "cache" in inspect.signature(model.forward).parameters
    context = idx[:, -limit:]
    new = context  # what is not in the cache yet
    caches = {}
    for _ in range(max_new_tokens):
        if context.size(1) > limit:
            half = max(1, limit // 2)
            context = context[:, -half:]
            new = context
        if takes_cache and new is context:
            caches = {"cache": [KVCache() for _ in model.blocks]}
        logits, _ = model(new, **caches)
        logits = logits[:, -1, :vocab_size].float()
        token = draw(logits, temperature, top_k, generator)
        idx = torch.cat((idx, token), dim=1)
        context = torch.cat((context, token), dim=1)
        new = token if takes_cache else context
    return idx


def draw(logits, temperature, top_k, generator):
    """Draw a token (B, 1) from logits (B, V); temperature 0 takes the likeliest."""
    if temperature < 1e-6:  # this close to 0, logits / temperature would overflow
        return logits.argmax(dim=-1, keepdim=True)
    if top_k and top_k > 0:
        k = min(top_k, logits.size(-1))
        least = logits.topk(k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    probabilities = F.softmax(logits / temperature, dim=-1)
    return torch.multinomial(probabilities, num_samples=1, generator=generator)


def arguments(argv):
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.error = sys.exit  # one line and exit code 1, as everywhere here
    add = parser.add_argument
    add("--init_from", default="resume", help="resume, or a Hugging Face model's name or path")
    add("--out_dir", default="out", help="resume takes its newest checkpoint (%(default)s)")
    add("--start", type=prompt, help="the prompt (a line end); FILE:path reads a file; backslashes "
        r"stay (in bash $'\n' is a line end)")
    add("--num_samples", type=int, default=3, help="(%(default)s)")
    add("--max_new_tokens", type=int, default=500, help="tokens per sample (%(default)s)")
    add("--temperature", type=float, default=0.8, help="<= 0: likeliest token (%(default)s)")
    add("--top_k", type=int, default=200, help="of the k likeliest; <= 0: of all (%(default)s)")
    add("--seed", type=int, default=1337, help="(%(default)s)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", default="auto", choices=("auto", *DTYPES))
    return parser.parse_args(argv)


def prompt(start):
    if not start.startswith("FILE:"):
        return start
    try:
        return Path(start.removeprefix("FILE:")).read_text("utf-8")
    except OSError as e:
        raise SystemExit(f"--start={start}: {e}")


def main(argv):
    args = arguments(argv)
    keys = ("init_from", "out_dir", "device", "dtype")
    flags = [f"--{key}={getattr(args, key)}" for key in keys]
    cfg = load_config(["--compile=False", *flags])
    world = World(device=pick_device(cfg.device))
    source, _ = open_start(cfg, world)
    theirs = source.header["config"]
    sizes = source.header["model_args"]
    cfg = with_sizes(resolve(cfg, world), theirs["model"], sizes, source.path)
    cfg = with_base(cfg, world, resumed=True)
    model = meta_model(cfg)
    if not getattr(model, "causal", True):
        raise SystemExit(f"model={cfg.model} has causal = False: it does not write left to right")
    parallelize(model, cfg, world)
    set_values(model, None, source, cfg.seed, world)
    model.eval()

    # A Hugging Face directory contains its own tokenizer.
    directory = data_dir(theirs["dataset"]) if "dataset" in theirs else source.path
    require_same_tokens(source, directory)
    meta = source.header.get("meta") or read_meta(directory)
    meta = {"vocab_size": cfg.sizes.vocab_size, **meta}
    encode, decode, vocab_size = tokenizer(meta, directory)
    # Without a prompt a line begins; or the first token does, where there is no line end.
    line_end = "\n" if "\n" in meta.get("chars", "\n") else ""
    start = line_end if args.start is None else args.start
    tokens = encode(start) or encode(line_end) or [0]
    limit = cfg.sizes.block_size
    if len(tokens) > limit:
        print(f"the prompt has {len(tokens)} tokens; the model sees the last {limit}",
              file=sys.stderr)
    x = torch.tensor([tokens], device=world.device)
    generator = torch.Generator(world.device).manual_seed(args.seed)
    # On H100s PyTorch prefers cuDNN's attention, which makes a new plan for each cache length.
    torch.backends.cuda.enable_cudnn_sdp(False)
    with autocast(model, world.device.type, DTYPES[cfg.dtype]):
        for _ in range(args.num_samples):
            y = generate(
                model, x, args.max_new_tokens, args.temperature, args.top_k, vocab_size, generator)
            print(decode(y[0].tolist()))
            print("---------------")


if __name__ == "__main__":
    run(main, sys.argv[1:])
