"""
WikiText-103 (raw) with GPT-2's BPE: about 118 million training tokens; a row is a paragraph.

    python data/wikitext103/prepare.py                 # 240 MB
    python data/wikitext103/prepare.py --limit=10000   # a taste
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from data.prepare import main  # noqa: E402

if __name__ == "__main__":
    options = dict(subset="wikitext-103-raw-v1", val_fraction=0.005)
    main("wikitext103", "Salesforce/wikitext", doc=__doc__, **options)
