"""
OpenWebText with GPT-2's BPE: 8,013,769 documents, about 9.0 billion training and 4.4
million validation tokens.

    python data/openwebtext/prepare.py                 # 17 GB
    python data/openwebtext/prepare.py --limit=10000   # a taste
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[2]))
from data.prepare import main  # noqa: E402

if __name__ == "__main__":
    # The hub's Parquet copy. The original is a script, which datasets >= 4 rejects.
    main("openwebtext", "Skylion007/openwebtext", doc=__doc__)
