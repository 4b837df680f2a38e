"""
FineWeb-Edu, English web pages of educational value: its published samples.

    python data/fineweb_edu/prepare.py                        # 10 billion tokens, 20 GB
    python data/fineweb_edu/prepare.py --subset=sample-100BT  # 200 GB; sample-350BT: 700 GB
    python data/fineweb_edu/prepare.py --limit=10000          # a taste

The text is streamed, so only its tokens need disk: 2 bytes each if the tokenizer's vocabulary
is at most 65,535, else 4. GPT-2's (the default), Llama 2's and SmolLM2's fit. Llama 3's and
Qwen3's don't, and they add 0.16 and 0.21 billion parameters to the embedding of a model that is
2,048 wide. That pays off for other languages and for code, which this data doesn't have.

--limit=N takes the first N documents of the sample and reads no further. They have about
1,030 tokens each. If a split is then too small, val gets the end of the text: see data/prepare.py.
"""

import sys
from argparse import ArgumentParser
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[2]))
from data.prepare import main  # noqa: E402

SAMPLE = "sample-10BT"
# {name: GPT-2 tokens}, according to https://huggingface.co/datasets/HuggingFaceFW/fineweb-edu
TOKENS = {"sample-10BT": 10e9, "sample-100BT": 100e9, "sample-350BT": 350e9}
A_DOCUMENT = 1029  # tokens on average: sample-10BT has 9,672,101 documents, 9.95e9 tokens


def announce(argv):
    """Print how many tokens to expect, and how much disk."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = lambda message: None  # main reports the error
    parser.add_argument("--subset", default=SAMPLE)
    parser.add_argument("--limit", type=int, default=sys.maxsize)
    args, _ = parser.parse_known_args(argv)
    if args.subset in TOKENS:
        tokens = min(TOKENS[args.subset], args.limit * A_DOCUMENT)
        print(
            f"{args.subset}: about {tokens / 1e9:,.3g} billion GPT-2 tokens, "
            f"{2 * tokens / 1e9:,.3g} GB of disk; twice that with a tokenizer with a vocabulary "
            "above 65,535")


if __name__ == "__main__":
    if not {"-h", "--help"}.intersection(sys.argv):
        announce(sys.argv[1:])
    main("fineweb_edu", "HuggingFaceFW/fineweb-edu", doc=__doc__, subset=SAMPLE)
