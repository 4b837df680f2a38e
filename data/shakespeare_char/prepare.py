"""
Tiny Shakespeare, one token per character (65 of them): 1,003,854 training and 111,540
validation tokens.

    python data/shakespeare_char/prepare.py                      # 1.1 MB; checks its sha256
    python data/shakespeare_char/prepare.py --input=input.txt    # a local copy
"""

import hashlib
import sys
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[2]))
from data.prepare import HERE, parser_of, write_small  # noqa: E402

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def main():
    out, train, val = tiny_shakespeare("shakespeare_char", __doc__)
    chars = sorted(set(train + val))
    ids = {c: i for i, c in enumerate(chars)}
    train = [ids[c] for c in train]
    val = [ids[c] for c in val]
    write_small(out, train, val, vocab_size=len(chars), chars=chars)


def tiny_shakespeare(name, doc):
    """Parse the command line, also data/shakespeare's: (where to write, train's text, val's).
    SystemExit if there is no network, or another text."""
    parser = parser_of(doc)
    parser.add_argument("--input", metavar="FILE", help="a local copy; no download")
    args = parser.parse_args()
    url = URL
    if args.input:
        url = Path(args.input).expanduser().absolute().as_uri()
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            raw = response.read()
    except OSError as e:
        raise SystemExit(f"{url}: {e}; get the file elsewhere and pass --input=FILE")
    if hashlib.sha256(raw).hexdigest() != SHA256:
        raise SystemExit(f"{url}: its sha256 is not that of tiny Shakespeare, {SHA256}")
    text = raw.decode()
    end = int(0.9 * len(text))  # nanoGPT's: the last tenth is for validation
    return args.out or HERE / name, text[:end], text[end:]


if __name__ == "__main__":
    main()
