"""
Documents: texts from files and from data sets of Hugging Face's hub, for prepare.py.

    for place, document in documents(args):    # args: prepare.py's options
        document.text, document.spans

In .jsonl, .ndjson, .json, .parquet, .csv and .tsv files each row is a document. Any other file
is one document.
"""

import glob
import json
import os
import re
from dataclasses import dataclass
from functools import partial

from data.files import extra

# {a file's extension: the name of its reader in the `datasets` library}
READERS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
}
HUB_NAME = r"\w[\w.-]*(/[\w.-]+)?"  # of a data set there: name, or owner/name
TEXT = (str, int, float, type(None))  # what a column of text may hold


@dataclass
class Document:
    text: str
    # [(start, end)]: the characters that the model learns to predict; None for all of them.
    spans: list | None = None
    # True if a chat template wrote the text: it has its special tokens, and none are added.
    has_special_tokens: bool = False

    @property
    def key(self):
        """A string that identifies the document: its hash puts it into train or val."""
        if self.spans is None:
            return self.text
        return json.dumps((self.text, self.spans), ensure_ascii=False)

    def documents(self, encoder):
        """[itself]; a chat may be several."""
        return [self]


def documents(args, place=(0, 0)):
    """Yield (place, document) for each row of args.source after `place`. The document is None
    for a row without text. SystemExit if a source cannot be read.

    place: (index of the source, how many of its rows have been read). args: prepare.py's
    options source, subset, split, column, template, learn and chat.
    """
    document_of = row_reader(args)
    first, skip = place
    for number, source in enumerate(args.source[first:], first):
        try:
            for row in rows(source, args, skip):
                skip += 1
                yield (number, skip), document_of(row, f"{source}: row {skip}")
        except Exception as e:  # a dozen kinds: no network, no such data set, a damaged file
            reason = " ".join(str(e).split())[:300]
            remedy = "a file must be whole, and UTF-8"
            if not os.path.exists(source):
                remedy = "it is no file here; for a hub data set check its name and the network"
            raise SystemExit(f"{source}: {type(e).__name__}: {reason}; {remedy}")
        skip = 0


def rows(source, args, skip):
    """Yield the rows of one file or hub data set, each {column: value}, after the first
    `skip`."""
    extension = os.path.splitext(source)[1].lower()
    is_local = os.path.isfile(source)
    if os.path.exists(source) and not is_local:
        raise SystemExit(f"{source}: not a file; name the files in it, as {source}/*.txt")
    # A source that is not here, and is not named like a file, is a hub data set.
    is_file_name = extension in (*READERS, ".txt") or not re.fullmatch(HUB_NAME, source)
    if not is_local and is_file_name:
        raise SystemExit(f"{source}: no such file")
    if is_local and extension not in READERS:
        if skip == 0:
            with open(source, encoding="utf-8-sig") as f:  # without a byte order mark
                text = f.read()
            yield {"text": text, args.column: text}  # --column is for the other files
        return
    if is_local and os.path.getsize(source) == 0:
        return  # `datasets` would fail

    import datasets
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # documents() prints errors
    options = dict(name=args.subset, split=args.split)
    if is_local:
        options = dict(data_files=[glob.escape(source)], split="train")
        source = READERS[extension]
        if source == "csv":
            options["sep"] = "\t" if extension == ".tsv" else ","
            # Only an empty field is null. By default pandas takes "NA", "None", ... for null.
            options |= dict(keep_default_na=False, na_values=[""])
    yield from datasets.load_dataset(source, **options, streaming=True).skip(skip)


def row_reader(args):
    """The function that makes a document of a row, given (row, where); where: for errors."""
    if args.chat:
        return partial(extra("chat", wanted_by="--chat").chat_of, args.column)
    template = args.template or "{" + args.column + "}"
    learned = args.learn.split(",") if args.learn else []
    return partial(render, template.replace(r"\n", "\n"), learned)


def render(template, learned, row, where):
    """The Document that has the row's value for each {column} of the template; null is empty.
    learned: the columns whose values are learned; if there are none, all of the text is."""
    text = ""
    spans = []
    for i, part in enumerate(re.split(r"{([^{}]+)}", template)):
        if i % 2 == 0:  # text between columns
            text += part
            continue
        start = len(text)
        text += value(row, part, where)
        if part in learned:
            spans.append((start, len(text)))
    return Document(text, spans or None) if text else None


def value(row, column, where):
    """A row's text in a column. SystemExit if the column is missing or holds no text."""
    found = row.get(column, [])
    if not isinstance(found, TEXT):
        others = [name for name, one in row.items() if isinstance(one, TEXT)]
        if others:
            raise SystemExit(
                f"{where}: no text in column {column}; pass --column or --template for one of "
                f"{', '.join(others)}")
        raise SystemExit(
            f"{where}: no text in column {column}, nor in another; for chats pass --chat, or "
            'write each text as a line {"text": "..."} of a .jsonl file')
    return "" if found is None else str(found)


def up_to(docs, count):
    """Yield from documents() until `count` rows with text have come."""
    if count < 1:
        return
    for place, document in docs:
        yield place, document
        count -= document is not None
        if count == 0:
            return
