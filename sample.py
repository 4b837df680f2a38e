"""
Sample text from a trained model.

    python sample.py --out_dir=out-quickstart                    # its newest checkpoint
    python sample.py --out_dir=out-quickstart --start='def ' --num_samples=3
    python sample.py --init_from=gpt2 --start=FILE:prompt.txt    # or a hub name, a directory
    echo 'import os' | python sample.py --out_dir=out-quickstart --start=-    # from stdin
    python sample.py --out_dir=out --start=ids:1,2,3    # token ids

If no tokenizer is known, the samples are token ids too. An end of text ends no sample: the model
goes on with another text.
"""

import inspect
import math
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter

import torch
from torch.nn import functional as F

from configurator import DTYPES, load_config, resolve, with_sizes
from data.loader import data_dir, read_meta
from data.tokenizer import tokenizer
from fsdp import autocast
from ranks import World, pick_device, run
from start import open_source, with_own_files
from train import meta_model, parallelize, set_values


class KVCache:
    """The keys and values that one block has computed, (B, nh, length, hs) each."""

    def __init__(self):
        self.length = 0

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
    model,
    idx,
    max_new_tokens,
    temperature=1.0,
    top_k=None,
    vocab_size=None,
    generator=None,
    use_cache=True,
):
    """Continue idx (B, T) by sampled tokens; returns (B, T + max_new_tokens).

    vocab_size: the tokenizer's own size, so that the vocabulary's padding is never drawn.
    The text does not depend on use_cache. A full context restarts from its last half:
    positions are absolute, so a sliding window would invalidate the cache at every token.
    Under FSDP every rank must call it, with the same idx and seed: each forward gathers.
    """
    limit = model.config.block_size
    takes_cache = "cache" in inspect.signature(model.forward).parameters
    start = max(0, idx.size(1) - limit)  # of the context
    cache = None
    for _ in range(max_new_tokens):
        if idx.size(1) - start > limit:
            start = idx.size(1) - max(1, limit // 2)
            cache = None
        if not (use_cache and takes_cache):
            logits, _ = model(idx[:, start:])
        elif cache is None:
            cache = [KVCache() for _ in model.blocks]
            logits, _ = model(idx[:, start:], cache=cache)
        else:
            logits, _ = model(idx[:, -1:], cache=cache)
        logits = logits[:, -1, :vocab_size].float()  # (B, V)
        token = draw(logits, temperature, top_k, generator)
        idx = torch.cat((idx, token), dim=1)
    return idx


def draw(logits, temperature, top_k, generator):
    """Draw a token (B, 1) from logits (B, V); temperature 0 takes the likeliest."""
    if temperature < 1e-6:  # this close to 0, logits / temperature would overflow
        return logits.argmax(dim=-1, keepdim=True)
    if top_k:
        largest = logits.topk(min(top_k, logits.size(-1))).values
        logits = logits.masked_fill(logits < largest[:, -1:], -math.inf)
    probabilities = F.softmax(logits / temperature, dim=-1)
    return torch.multinomial(probabilities, num_samples=1, generator=generator)


def arguments(argv):
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.error = sys.exit  # one line and exit code 1, as everywhere here
    add = parser.add_argument
    add("--init_from", default="resume", help="resume, or a Hugging Face model's name or path")
    add("--out_dir", default="out", help="resume takes its newest checkpoint (%(default)s)")
    add("--start", type=prompt, default="\n",
        help="the prompt; FILE:path reads a file, - reads stdin; ids:1,2,3 are tokens")
    add("--num_samples", type=int, default=3, help="(%(default)s)")
    add("--max_new_tokens", type=int, default=500, help="tokens per sample (%(default)s)")
    add("--temperature", type=float, default=0.8, help="0: likeliest token (%(default)s)")
    add("--top_k", type=int, default=200, help="sample from the k likeliest; 0: all (%(default)s)")
    add("--seed", type=int, default=1337, help="(%(default)s)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", default="auto", choices=("auto", *DTYPES))
    args = parser.parse_args(argv)
    smallest = dict(num_samples=1, max_new_tokens=1, temperature=0, top_k=0, seed=0)
    for key, least in smallest.items():
        value = getattr(args, key)
        if not value >= least:  # written so that nan is refused too
            parser.error(f"--{key}={value}: it must be at least {least}")
    return args


def prompt(start):
    """The text, or a list of token ids."""
    if start.startswith("ids:"):
        try:
            ids = [int(word) for word in start.removeprefix("ids:").split(",")]
            if min(ids) >= 0:
                return ids
        except ValueError:
            pass
        raise SystemExit(f"--start={start}: write token ids as ids:1,2,3")
    if start == "-":
        source = 0  # stdin
    elif start.startswith("FILE:"):
        source = os.path.expanduser(start.removeprefix("FILE:"))
    else:
        return os.fsencode(start).decode("utf-8", "replace")  # whatever the locale
    try:
        with open(source, encoding="utf-8") as f:
            return f.read()
    except (OSError, UnicodeDecodeError) as e:
        raise SystemExit(f"--start={start}: {e}")


def main(argv):
    args = arguments(argv)
    keys = ("init_from", "out_dir", "device", "dtype")
    flags = [f"--{key}={getattr(args, key)}" for key in keys]
    cfg = load_config(["--compile=False", *flags])
    world = World(device=pick_device(cfg.device))
    source = open_source(cfg, world)
    if source is None:
        raise SystemExit(
            f"init_from={args.init_from}: no model to sample from in out_dir={args.out_dir}; "
            "pass a run's --out_dir, or --init_from=gpt2")
    theirs = source.header["config"]
    sizes = source.header["model_args"]
    cfg = with_sizes(resolve(cfg, world), theirs["model"], sizes, source.path)
    cfg = with_own_files(cfg, True, world)
    model = meta_model(cfg)
    if not getattr(model, "causal", True):
        raise SystemExit(
            f"model={cfg.model}: its class has causal = False, but sample.py writes from left to "
            "right; sample from it with your own code")
    parallelize(model, cfg, world)
    set_values(model, None, source, cfg.seed, world)
    model.eval()

    # A Hugging Face directory contains its own tokenizer.
    directory = data_dir(theirs["dataset"]) if "dataset" in theirs else source.path
    meta = source.header.get("meta") or read_meta(directory)
    meta = {"vocab_size": cfg.sizes.vocab_size, **meta}
    encode, decode, vocab_size = tokenizer(meta, directory)
    if isinstance(args.start, list):
        tokens = args.start
    else:
        tokens = encode(args.start) or encode("\n")
    if max(tokens) >= min(vocab_size, cfg.sizes.vocab_size):
        raise SystemExit(
            f"--start: token {max(tokens)} is beyond the vocabulary of {vocab_size}")
    x = torch.tensor([tokens], device=world.device)
    generator = torch.Generator(world.device).manual_seed(args.seed)
    # On H100s PyTorch prefers cuDNN's attention, which makes a new plan for each cache length.
    torch.backends.cuda.enable_cudnn_sdp(False)
    with autocast(model, world.device.type, DTYPES[cfg.dtype]):
        for _ in range(args.num_samples):
            y = generate(
                model,
                x,
                args.max_new_tokens,
                args.temperature,
                args.top_k,
                vocab_size,
                generator,
            )
            text = decode(y[0].tolist())
            encoding = sys.stdout.encoding or "utf-8"
            print(text.encode(encoding, errors="replace").decode(encoding))
            print("---------------")


if __name__ == "__main__":
    run(main, sys.argv[1:])
