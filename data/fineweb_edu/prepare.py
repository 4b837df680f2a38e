"""
FineWeb-Edu, its sample of 10 billion tokens, with GPT-2's BPE: 9,672,101 documents, about
9.95 billion training tokens.

    python data/fineweb_edu/prepare.py                 # 20 GB
    python data/fineweb_edu/prepare.py --limit=10000   # a taste
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[2]))
from data.prepare import main  # noqa: E402

if __name__ == "__main__":
    main("fineweb_edu", "HuggingFaceFW/fineweb-edu", doc=__doc__, subset="sample-10BT")
