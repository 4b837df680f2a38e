"""
Tiny Shakespeare with GPT-2's BPE, for fine-tuning: 301,966 training and 36,059 validation
tokens, nanoGPT's split.

    python data/shakespeare/prepare.py                      # 1.1 MB; checks its sha256
    python data/shakespeare/prepare.py --input=input.txt    # a local copy
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[2]))
from data.prepare import write_small  # noqa: E402
from data.shakespeare_char.prepare import tiny_shakespeare  # noqa: E402
from data.tokenizer import gpt2_bpe  # noqa: E402

if __name__ == "__main__":
    out, train, val = tiny_shakespeare("shakespeare", __doc__)
    encode = gpt2_bpe().encode_ordinary
    write_small(out, encode(train), encode(val), vocab_size=50304, tokenizer="gpt2")
