"""
WikiText-103 (raw) with GPT-2's BPE: about 118 million training tokens, and its own validation
split. Each row is a paragraph.

    python data/wikitext103/prepare.py                 # 240 MB
    python data/wikitext103/prepare.py --limit=10000   # a taste
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[2]))
from data.prepare import main  # noqa: E402

if __name__ == "__main__":
    options = dict(subset="wikitext-103-raw-v1", val_split="validation")
    main("wikitext103", "Salesforce/wikitext", doc=__doc__, **options)
