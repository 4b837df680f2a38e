"""
Tiny Shakespeare with GPT-2's BPE, for fine-tuning: 301,966 training and 36,059 validation
tokens, nanoGPT's split.

    python data/shakespeare/prepare.py                      # 1.1 MB; checks its sha256
    python data/shakespeare/prepare.py --input=input.txt    # a local copy
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[2]))
from data.shakespeare_char.prepare import main  # noqa: E402
from data.tokenizer import gpt2_bpe  # noqa: E402


def bpe(text):
    return gpt2_bpe().encode_ordinary, {"vocab_size": 50304, "tokenizer": "gpt2"}


if __name__ == "__main__":
    main("shakespeare", __doc__, bpe)
