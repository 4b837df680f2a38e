"""
Print text that a trained model makes up.

    python sample.py --out_dir=out-quickstart                                # the newest checkpoint there, full or sharded
    python sample.py --out_dir=out-quickstart --start='def ' --num_samples=3
    python sample.py --init_from=gpt2 --start=FILE:prompt.txt                # GPT-2, or a Hugging Face directory
    echo 'import os' | python sample.py --out_dir=out-quickstart --start=-   # prompt from standard input
"""

import argparse
import sys
import time

import torch

import fsdp
from checkpoint import load, open_source
from data.loader import data_dir, read_meta, tokenizer
from model import GPT, GPTConfig
from train import Config


def arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--init_from", default="resume", help="resume: the newest checkpoint in out_dir; or gpt2, gpt2-medium, -large, -xl, or a directory in Hugging Face format")
    parser.add_argument("--out_dir", default="out", help="where the checkpoint is (default: %(default)s)")
    parser.add_argument("--start", default="\n", help="the prompt; FILE:path reads it from a file, - from standard input")
    parser.add_argument("--num_samples", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--max_new_tokens", type=int, default=500, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.8, help="below 1 more likely text, 0 always the likeliest token (default: %(default)s)")
    parser.add_argument("--top_k", type=int, default=200, help="draw from the k likeliest tokens only, 0: from all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1337, help="default: %(default)s")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    parser.add_argument("--dtype", default="auto", choices=("auto", *fsdp.DTYPES))
    parser.add_argument("--use_cache", default=True, type=lambda s: s.lower() != "false", help="False computes every token from the whole context, for comparison")
    args = parser.parse_args(argv)
    if args.num_samples < 1 or args.max_new_tokens < 1 or args.temperature < 0 or args.top_k < 0:
        raise SystemExit("num_samples and max_new_tokens must be at least 1, temperature and top_k at least 0")
    return args


def read_prompt(start):
    if start == "-":
        return sys.stdin.read()
    if start.startswith("FILE:"):
        try:
            with open(start[5:], encoding="utf-8") as f:
                return f.read()
        except (OSError, UnicodeDecodeError) as e:
            raise SystemExit(f"--start={start}: {e}")
    return start


def main(argv):
    args = arguments(argv)
    device = fsdp.pick_device(args.device)
    dist = fsdp.Dist(device=device)
    source = open_source(args.init_from, args.out_dir, dist)
    with torch.device("meta"):
        gpt = GPT(GPTConfig(**{**source.header["model_args"], "dropout": 0.0}))
    cfg = fsdp.resolve(Config(strategy="single", compile=False, dtype=args.dtype, gradient_accumulation_steps=1), dist)
    fsdp.parallelize(gpt, cfg, dist)
    load(source, gpt, None, dist)
    gpt.eval()

    dataset = source.header["config"].get("dataset")
    encode, decode, vocab_size = tokenizer(read_meta(data_dir(dataset)) if dataset else {})
    prompt = encode(read_prompt(args.start)) or encode("\n")
    x = torch.tensor([prompt], device=device)
    generator = torch.Generator(device).manual_seed(args.seed)
    t0 = time.time()
    with fsdp.autocast(cfg, device):
        for _ in range(args.num_samples):
            y = gpt.generate(x, args.max_new_tokens, args.temperature, args.top_k, vocab_size, generator, args.use_cache)
            print(decode(y[0].tolist()))
            print("---------------")
    print(f"{args.num_samples * args.max_new_tokens / (time.time() - t0):,.0f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    fsdp.run(main, sys.argv[1:])
