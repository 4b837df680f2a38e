r"""
Files of tokens with masks: the model learns only some of them, the answers of a chat for example.

    python -m extras.masks my_data qa.jsonl --learn=answer --template=$'Q: {question}\nA: {answer}'
    python -m extras.masks my_data notes/*.txt --window=1024

It is data/prepare.py with three more options; extras/docs/masks.md has the recipe for chats. Beside
each .bin lies a .mask: one byte per token, 1 if it is learned. The loss is the mean over those.
"""

import json
import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))
from data import prepare  # noqa: E402
from data.documents import COLUMN, value  # noqa: E402
from data.files import has_masks, open_split  # noqa: E402
from data.tokenizer import gpt2_bpe  # noqa: E402
from extras.masked import open_masks  # noqa: E402


def main(*args, **options):
    """The command, with the arguments of data/prepare.py's main()."""
    out = prepare.main(*args, job_of=job_of, more_options=more_options, **options)
    if has_masks(out):
        masks = [mask for split in prepare.SPLITS for mask in open_masks(open_split(out, split))]
        share = sum(map(np.count_nonzero, masks)) / sum(map(len, masks))
        print(f"{out}: {share:.1%} of the tokens are learned")


def more_options(option):
    # None where they are not given, so that a data set of prepare.py's is known again.
    option("--learn", metavar="A,B", help="columns of --template: learn only their text")
    option("--window", metavar="N", type=int,
           help="start each document at a multiple of N tokens, for block_size=N")
    option("--special", action="store_true", default=None,
           help="a chat template wrote the text: <|im_end|> and the like are special tokens, and "
                "none are added")


def job_of(args, own):
    """The Job of prepare.py, or one with masks if args ask for them."""
    require_learned_columns(args)
    if args.special and not own.encoding:
        raise SystemExit("--special: this tokenizer has no special tokens; pass --tokenizer= the "
                         "directory or hub name of a model for chats")
    if args.learn or args.window or args.special:
        return Masked(args, own)
    return prepare.Job(args, own)


def require_learned_columns(args):
    """SystemExit if --learn names a column that the template lacks."""
    columns = re.findall(COLUMN, args.template or "")
    for column in args.learn.split(",") if args.learn else []:
        if column not in columns:
            raise SystemExit(
                f"--learn={args.learn}: the template has no {{{column}}}; pass --template with "
                f"it, such as --template='{{question}} {{{column}}}'")


@dataclass
class Document:
    text: str
    # [(start, end)]: the characters that the model learns to predict; None for all of them.
    spans: list | None = None


class Masked(prepare.Job):
    """Rows become Documents, and a token has two fields: itself, and if it is learned."""

    def __init__(self, args, own):
        super().__init__(args, own)
        self.item = np.dtype([("token", self.dtype), ("learned", np.uint8)])
        self.window = args.window or 1  # each document begins at a multiple of it
        self.meta = {"window": args.window} if args.window else {}
        self.special = bool(args.special)
        self.document = partial(render, self.template, args.learn.split(",") if args.learn else [])

    def key(self, document):
        if document.spans is None:
            return document.text
        return json.dumps((document.text, document.spans), ensure_ascii=False)

    def encode(self, document, own):
        """A document's tokens and mask. The tokens are those of the whole text: some tokenizers
        split a part of it differently when it stands alone."""
        text = document.text
        spans = document.spans or [(0, len(text))]
        ids, places = places_of(text, own, self.special)
        ids = list(ids)
        learned = overlaps(places, spans, len(text))
        if not self.special:
            if ids[-1:] != [own.end]:
                ids.append(own.end)
                learned.append(False)
            learned[-1] = spans[-1][1] == len(text)
        padding = -len(ids) % self.window
        items = np.empty(len(ids) + padding, self.item)
        items["token"] = ids + padding * [own.end]
        items["learned"] = learned + padding * [False]
        if self.window > 1:
            items["learned"][0] = False  # it would be the last target of the window before
        return items

    def files(self, items):
        if self.window > 1:
            # A token more, since the last window's last target follows it. It is not learned.
            items = np.append(items, np.zeros(1, self.item))
        return {".bin": items["token"], ".mask": items["learned"]}


def render(template, learned, row, where):
    """The Document that has the row's value for each {column} of the template; None if that is
    empty, or the last value to learn is: it would teach the model to end at once.
    learned: the columns whose values are learned; if there are none, all of the text is."""
    text = ""
    spans = []
    for i, part in enumerate(re.split(COLUMN, template)):
        if i % 2 == 0:  # text between columns
            text += part
            continue
        start = len(text)
        text += value(row, part, where)
        if part in learned:
            spans.append((start, len(text)))
    answer = text[slice(*spans[-1])].strip() if spans else text
    return Document(text, spans or None) if answer else None


# ---------- which characters a token stands for -------------------------------


def places_of(text, own, has_special_tokens):
    """(ids, [(start, end)]): the tokens of a text, and the characters that each stands for."""
    if own.encoding:
        found = own.encoding(text, has_special_tokens)
        return found.ids, found.offsets
    ids = own.encode(text)
    sizes = [1] * len(ids)
    if own.name == "gpt2":
        sizes = map(len, gpt2_bpe().decode_tokens_bytes(ids))
    return ids, places_of_pieces(text, sizes)


def places_of_pieces(text, sizes):
    """[(start, end)]: the characters that each piece has a byte of. sizes: of the pieces, in
    bytes; one may be part of a character."""
    character = []  # of each byte
    for i, one in enumerate(text):
        character += [i] * len(one.encode())
    places = []
    at = 0
    for size in sizes:
        places.append((character[at], character[at + size - 1] + 1))
        at += size
    return places


def overlaps(places, spans, length):
    """A list: True for each token that has a character in a span. places: [(start, end)] of
    the tokens; length: of the text."""
    before = np.zeros(length + 1, int)  # i: how many of the first i characters are in spans
    for start, end in spans:
        before[start + 1:end + 1] = 1
    before = before.cumsum()
    starts, ends = np.array(places, int).reshape(-1, 2).T
    # A token of spaces alone may have an empty place, of which only the end is right.
    starts = np.minimum(starts, ends - 1).clip(0)
    return (before[ends] > before[starts]).tolist()


if __name__ == "__main__":
    main(doc=__doc__)
