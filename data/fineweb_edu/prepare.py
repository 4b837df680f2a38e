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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[2]))
from data.prepare import main  # noqa: E402

if __name__ == "__main__":
    main("fineweb_edu", "HuggingFaceFW/fineweb-edu", doc=__doc__, subset="sample-10BT")
