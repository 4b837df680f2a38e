"""
Documents: texts from files and from data sets on the Hugging Face hub, for prepare.py.

    for row in rows("a.csv", args.split, args.subset):    # args: prepare.py's options
        text = render("{title}: {text}", row, where)      # where: "a.csv: row 2", for errors

In .jsonl, .ndjson, .json, .parquet, .csv and .tsv files each row is a document; any other file is
one document. Each may be packed, as .gz (but .parquet).

Text is kept as written. Readers that guess types change it: 007 becomes 7, NA nothing, a date a
timestamp. So the standard library reads all files but Parquet, whose columns have types.
"""

import csv
import glob
import gzip
import json
import os
import re
import sys

DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON = (".jsonl", ".ndjson", ".json")
COLUMN = r"{([^{}]+)}"  # in a template
TEXT = (str, int, float, type(None))  # types that a column of text may hold


class Written(str):
    """A number, exactly as written in the file."""


AS_WRITTEN = dict(parse_int=Written, parse_float=Written, parse_constant=Written)


def documents(args, split, document_of, limit=sys.maxsize):
    """Yield document_of(row, where) for each row of args.source, or None for a row without text,
    until there are `limit` documents. split: of hub data sets. SystemExit if a source cannot be
    read."""
    for source in args.source:
        number = 0
        try:
            for number, row in enumerate(rows(source, split, args.subset), 1):
                document = document_of(row, f"{source}: row {number}")
                yield document
                limit -= document is not None
                if limit == 0:
                    return
        except Exception as e:  # of a dozen kinds: no network, a damaged file, not UTF-8
            reason = " ".join(str(e).split())[:300]
            raise SystemExit(f"{source}, after row {number}: {type(e).__name__}: {reason}")


# ---------- from rows to text -------------------------------------------------


def render(template, row, where):
    """The template with each {column} replaced by the row's value; null is empty."""
    return re.sub(COLUMN, lambda match: value(row, match[1], where), template)


def value(row, column, where):
    """A row's text in a column. SystemExit if the column is missing or holds no text."""
    found = row.get(column, [])
    if isinstance(found, bool):
        return json.dumps(found)
    if isinstance(found, TEXT):
        return "" if found is None else encodable(str(found))
    # (A later JSON row that lacks the column has null there.)
    others = ", ".join(name for name, one in row.items() if isinstance(one, TEXT))
    raise SystemExit(
        f"{where}: no text in column {column}; pass --column or --template for one that has some, "
        f"here {others or 'none'}")


def encodable(text):
    """The text with ? for each half of a surrogate pair, which JSON can express but UTF-8
    cannot."""
    return text.encode(errors="replace").decode()


# ---------- from sources to rows ----------------------------------------------


def rows(source, split, subset):
    """Yield {column: value} for each row of one file or, if there is none, of a hub data set."""
    extension = os.path.splitext(source.lower().removesuffix(".gz"))[1]
    if not os.path.exists(source):
        yield from rows_of_datasets(source, name=subset, split=split)
    elif extension == ".parquet":
        # batch_size: by default a file's first row group says it, and an empty one fails.
        how = dict(data_files=[glob.escape(source)], split="train", batch_size=1000)
        yield from rows_of_datasets("parquet", **how)
    else:
        open_file = gzip.open if source.lower().endswith(".gz") else open
        newline = "" if extension in DELIMITERS else None  # a field may have line ends
        with open_file(source, "rt", encoding="utf-8-sig", newline=newline) as f:
            if extension in JSON:
                yield from rows_of_json(f)
            elif extension in DELIMITERS:
                yield from rows_of_csv(f, DELIMITERS[extension])
            else:
                yield {"text": f.read()}


def rows_of_json(f):
    """One object per line, or one array of objects."""
    is_array = f.read(999).lstrip().startswith("[")
    f.seek(0)
    if is_array:
        found = json.load(f, **AS_WRITTEN)
    else:
        found = (json.loads(line, **AS_WRITTEN) for line in f if line.strip())
    columns = {}
    for row in found:
        columns = columns or dict.fromkeys(row)
        yield {**columns, **row}  # a column of the first row that this row lacks is null


def rows_of_csv(f, delimiter):
    """Rows below a line of column names; quotes are as in a spreadsheet's export."""
    csv.field_size_limit(sys.maxsize)  # default: 131,072 characters
    # strict: otherwise an unclosed quote swallows everything after it.
    reader = csv.DictReader(f, delimiter=delimiter, strict=True)
    names = [name for name in reader.fieldnames or () if name]
    if len(set(names)) < len(names):
        raise ValueError(f"two columns have one name: {', '.join(names)}")
    for row in reader:
        # A delimiter at the end of each row is common; more text than columns is a mistake. In
        # many .tsv files quotes are text: then a row could run on to the next quote.
        is_longer = any(row.pop(None, []))
        has_tab = "\t" in "".join(filter(None, row.values()))
        if is_longer or (has_tab and delimiter == "\t"):
            raise ValueError(f"a {delimiter!r} inside a text: quote it (.csv), or write .jsonl")
        yield row


def rows_of_datasets(path, **options):
    """The rows of datasets.load_dataset(path, **options)."""
    import datasets
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # documents() says what is wrong
    yield from datasets.load_dataset(path, **options, streaming=True)
