"""
OpenWebText with GPT-2's BPE: 8,013,769 documents, about 9.0 billion training and 4.4 million
validation tokens.

    python data/openwebtext/prepare.py                 # 17 GB
    python data/openwebtext/prepare.py --limit=10000   # a taste
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from data.prepare import main  # noqa: E402

if __name__ == "__main__":
    # the hub's Parquet copy: the original is a loading script, which datasets >= 4 refuses
    main("openwebtext", "Skylion007/openwebtext", doc=__doc__)
