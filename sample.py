"""
Sample text from a trained model.

    python sample.py --out_dir=out-quickstart                                # its newest checkpoint
    python sample.py --out_dir=out-quickstart --start='def ' --num_samples=3
    python sample.py --init_from=gpt2 --start=FILE:prompt.txt   # or Hugging Face's: a hub name, DIR
    echo 'import os' | python sample.py --out_dir=out-quickstart --start=-   # from standard input
"""

import inspect
import math
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter

import torch
from torch.nn import functional as F

import fsdp
from checkpoint import load
from configurator import load_config, resolve, with_model
from data.loader import data_dir, read_meta
from data.tokenizer import tokenizer
from ranks import World, pick_device, run
from train import meta_model, open_start


class KVCache:
    """The keys and values that one block has computed, (B, nh, length, hs); for generation only."""
    k = v = None
    length = 0

    def extend(self, k, v):
        if self.length:
            k, v = torch.cat((self.k, k), dim=2), torch.cat((self.v, v), dim=2)
        self.k, self.v, self.length = k, v, k.size(2)
        return k, v


@torch.no_grad()
def generate(model, idx, max_new_tokens, temperature=1.0, top_k=None, vocab_size=None,
             generator=None, use_cache=True):
    """Continue idx (B, T) by sampled tokens; returns (B, T + max_new_tokens).

    vocab_size: the tokenizer's real size, so that the rows that pad the vocabulary are never drawn.
    A full context restarts from its last half: positions are absolute, so a window that slides
    would invalidate the cache at every token. The text does not depend on use_cache.
    Under FSDP every rank must call it, with the same idx and seed: each forward gathers weights."""
    limit = model.config.block_size
    use_cache = use_cache and "cache" in inspect.signature(model.forward).parameters
    start, options = max(0, idx.size(1) - limit), {}
    for _ in range(max_new_tokens):
        if idx.size(1) - start > limit:
            start, options = idx.size(1) - max(1, limit // 2), {}
        new = idx[:, -1:] if options else idx[:, start:]
        if use_cache and not options:
            options = dict(cache=[KVCache() for _ in model.blocks])
        logits, _ = model(new, **options)
        token = draw(logits[:, -1, :vocab_size].float(), temperature, top_k, generator)
        idx = torch.cat((idx, token), dim=1)
    return idx


def draw(logits, temperature, top_k, generator):
    """One token (B, 1) from logits (B, V); temperature 0 takes the likeliest."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, [-1]]
        logits = logits.masked_fill(logits < kth, -math.inf)
    probabilities = F.softmax(logits / temperature, dim=-1)
    return torch.multinomial(probabilities, num_samples=1, generator=generator)


def arguments(argv):
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.error = sys.exit  # one line and exit code 1, as everywhere here
    add = parser.add_argument
    add("--init_from", default="resume", help="resume, or a Hugging Face model's name or directory")
    add("--out_dir", default="out", help="resume takes its newest checkpoint (%(default)s)")
    add("--start", type=prompt, default="\n", help="the prompt; FILE:path reads a file, - stdin")
    add("--num_samples", type=int, default=3, help="(%(default)s)")
    add("--max_new_tokens", type=int, default=500, help="tokens a sample (%(default)s)")
    add("--temperature", type=float, default=0.8, help="0: always the likeliest (%(default)s)")
    add("--top_k", type=int, default=200, help="draw from the k likeliest, 0: all (%(default)s)")
    add("--seed", type=int, default=1337, help="(%(default)s)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", default="auto", choices=("auto", *fsdp.DTYPES))
    args = parser.parse_args(argv)
    for key, least in dict(num_samples=1, max_new_tokens=1, temperature=0, top_k=0, seed=0).items():
        if not least <= getattr(args, key) < 2**63:
            parser.error(f"--{key}={getattr(args, key)}: it must be at least {least}, below 2**63")
    return args


def prompt(start):
    if start != "-" and not start.startswith("FILE:"):
        return start
    try:
        with open(0 if start == "-" else start[5:], encoding="utf-8") as f:
            return f.read()
    except (OSError, UnicodeDecodeError) as e:
        raise SystemExit(f"--start={start}: {e}")


def main(argv):
    args = arguments(argv)
    keys = ("init_from", "out_dir", "device", "dtype")
    cfg = load_config(["--compile=False", *(f"--{key}={getattr(args, key)}" for key in keys)])
    world = World(device=pick_device(cfg.device))
    source = open_start(cfg, world)
    if source is None:
        raise SystemExit(f"init_from={args.init_from}: no model to sample from in out_dir="
                         f"{args.out_dir}; pass a run's --out_dir, or --init_from=gpt2")
    cfg = with_model(resolve(cfg, world), source)
    model = meta_model(cfg)
    fsdp.parallelize(model, cfg, world)
    load(source, model, None, world)
    model.eval()

    dataset = source.header["config"].get("dataset")
    directory = data_dir(dataset) if dataset else source.path  # Hugging Face's has a tokenizer too
    meta = {"vocab_size": cfg.vocab_size, **(source.header.get("meta") or read_meta(directory))}
    encode, decode, vocab_size = tokenizer(meta, directory)
    x = torch.tensor([encode(args.start) or encode("\n")], device=world.device)
    generator = torch.Generator(world.device).manual_seed(args.seed)
    # H100s prefer cuDNN's attention, which makes a plan for each length of the cache
    torch.backends.cuda.enable_cudnn_sdp(False)
    with fsdp.autocast(cfg, world.device):
        for _ in range(args.num_samples):
            y = generate(model, x, args.max_new_tokens, args.temperature, args.top_k, vocab_size,
                         generator)
            print(decode(y[0].tolist()), "---------------", sep="\n")


if __name__ == "__main__":
    run(main, sys.argv[1:])
