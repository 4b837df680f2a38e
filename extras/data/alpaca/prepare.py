"""
Alpaca: 52,002 instructions and answers as text, with GPT-2's BPE, for fine-tuning. Its files go
to data/alpaca/.

    python extras/data/alpaca/prepare.py                 # 10 MB
    python extras/data/alpaca/prepare.py --limit=10000   # a taste
    python extras/data/alpaca/prepare.py --learn=output  # only the answers are learned
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[3]))
from extras.masks import main  # noqa: E402

TEMPLATE = "### Instruction:\n{instruction}\n{input}\n### Response:\n{output}"

if __name__ == "__main__":
    main("alpaca", "tatsu-lab/alpaca", doc=__doc__, hash_fraction=0.01, template=TEMPLATE)
