"""
Documents: texts from files and from data sets on the Hugging Face hub, for prepare.py.

    for where, row in rows("a.csv", args.split, args):    # args: prepare.py's options
        text = render("{title}: {text}", row, where)      # where: "a.csv: line 2", for errors

In .jsonl, .ndjson, .json, .parquet, .csv and .tsv files each row is a document, and so it is in a
file of any other name that begins with an object of JSON. Any other file is one document.

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
JSON = (".jsonl", ".jsonlines", ".jl", ".ndjson", ".json")
READABLE = (*JSON, *DELIMITERS, ".parquet", ".txt")
HUB_NAME = r"\w[\w.-]*(/[\w.-]+)?"  # of a data set: name, or owner/name
COLUMN = r"{([^{}]+)}"  # in a template
TEXT = (str, int, float, type(None))  # types that a column of text may hold


def documents(args, split, document_of, limit=sys.maxsize):
    """Yield document_of(row, where) for each row of args.source, or None for a row without text,
    until there are `limit` documents. split: of hub data sets. SystemExit if a source cannot be
    read."""
    for source in args.source:
        where = None
        for where, row in rows(source, split, args):
            document = document_of(row, where)
            yield document
            limit -= document is not None
            if limit == 0:
                return
        if where is None:
            print(f"{source}: it has no rows")


# ---------- from rows to text -------------------------------------------------


def render(template, row, where):
    """The template with each {column} replaced by the row's value; null is empty."""
    return re.sub(COLUMN, lambda match: value(row, match[1], where), template)


def value(row, column, where):
    """A row's text in a column. SystemExit if the column is missing or holds no text."""
    found = row.get(column, [])
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


def rows(source, split, args):
    """Yield (where, {column: value}) for each row of one file or hub data set."""
    extension = os.path.splitext(source.lower().removesuffix(".gz"))[1]
    is_local = os.path.isfile(source)
    # What is not here, and not named like a file, is a hub data set.
    is_hub_name = re.fullmatch(HUB_NAME, source) and extension not in READABLE
    if not is_local and (os.path.exists(source) or not is_hub_name):
        raise SystemExit(f"{source}: no such file; if it is a directory, name its files: DIR/*.txt")
    try:
        if not is_local:
            yield from rows_of_datasets(source, source, name=args.subset, split=split)
        elif extension == ".parquet":
            # batch_size: by default a file's first row group says it, and an empty one fails.
            how = dict(data_files=[glob.escape(source)], split="train", batch_size=1000)
            yield from rows_of_datasets(source, "parquet", **how)
        elif extension in DELIMITERS:
            yield from rows_of_csv(source, DELIMITERS[extension])
        elif extension in JSON or begins_as_json(source):
            yield from rows_of_json(source)
        elif args.column != "text":
            raise SystemExit(
                f"{source}: --column={args.column} is for rows; leave it out, or make it .jsonl")
        else:
            yield source, {"text": "".join(line for _, line in lines(source, newline=None))}
    except ImportError as e:
        raise SystemExit(f"{source}: {e}; pip install datasets")
    except Exception as e:  # of a dozen kinds: no network, no such data set, a damaged file
        reason = " ".join(str(e).split())[:300]
        remedy = "the file must be whole"
        if not is_local:
            remedy = "it is no file here; for a hub data set check its name and the network"
        raise SystemExit(f"{source}: {type(e).__name__}: {reason}; {remedy}")


def lines(source, newline="\n"):
    """Yield (number, text) of each line of a file, without a byte order mark: each of several
    files that `cat` has joined may have one. SystemExit at the first line that is not UTF-8.
    newline: as open() takes it; None makes CRLF and a lone CR \\n."""
    open_file = gzip.open if source.lower().endswith(".gz") else open
    # A bad byte becomes half of a surrogate pair, so it is found in its own line. The decoder
    # would raise for its whole block, before yielding the good lines in front of it.
    how = dict(encoding="utf-8", errors="surrogateescape", newline=newline)
    with open_file(source, "rt", **how) as f:
        for number, line in enumerate(f, 1):
            if encodable(line) != line or "\0" in line:
                raise SystemExit(
                    f"{source}: line {number} is not UTF-8, or has a NUL; convert the file (from "
                    "UTF-16: iconv -f UTF-16LE, or BE, -t UTF-8 FILE > NEW), or mend the line")
            yield number, line.removeprefix("\ufeff")


def begins_as_json(source):
    """True if a file's first line is an object of JSON, alone or in an array, whatever the file's
    name."""
    starts = (line.strip("[], \t\r\n") for _, line in lines(source))
    return re.fullmatch(r'{\s*".*}', next(filter(None, starts), "")) is not None


# ---------- JSON --------------------------------------------------------------


class Written(str):
    """A number, true or false, exactly as written in the file."""


def unique(pairs):
    """The object with these pairs; the pairs themselves if a key occurs twice."""
    found = dict(pairs)
    return found if len(found) == len(pairs) else pairs


DECODER = json.JSONDecoder(
    object_pairs_hook=unique, parse_int=Written, parse_float=Written, parse_constant=Written)


def rows_of_json(source):
    """One object per line, or one array of objects."""
    columns = None
    for where, row in values_of_json(source):
        if not isinstance(row, dict):
            raise SystemExit(
                f'{where}: {str(row)[:80]} is no object, or has a key twice; write a row as '
                '{"text": "..."}')
        for key, one in row.items():
            if isinstance(one, bool):
                row[key] = Written(json.dumps(one))
        # A column of the first row that this row lacks is null.
        columns = columns or dict.fromkeys(row)
        yield where, {**columns, **row}


def values_of_json(source):
    """Yield (where, value) of each line, or of each element of an array."""
    numbered = lines(source)
    is_first = True
    for number, line in numbered:
        if line.isspace():
            continue
        if is_first and line.lstrip().startswith("["):
            text = line + "".join(more for _, more in numbered)
            elements = parsed(text, source, number)
            yield from ((f"{source}: row {n}", one) for n, one in enumerate(elements, 1))
            return
        is_first = False
        yield f"{source}: line {number}", parsed(line, source, number)


def parsed(text, source, first):
    """The JSON value in the text; it starts at line `first` of the source."""
    try:
        return DECODER.decode(text.rstrip("\r\n"))
    except json.JSONDecodeError as e:
        line = first + e.lineno - 1
        raise SystemExit(
            f"{source}: line {line}, column {e.colno}: {e.msg}; mend the line, or take it out")


# ---------- CSV and TSV -------------------------------------------------------


def rows_of_csv(source, delimiter):
    """Rows below a line of column names; quotes are as in a spreadsheet's export."""
    csv.field_size_limit(sys.maxsize)  # default: 131,072 characters
    text = (line for _, line in lines(source))
    # strict: otherwise an unclosed quote swallows everything after it.
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    columns = None
    while True:
        where = f"{source}: line {reader.line_num + 1}"
        try:
            fields = next(reader, None)
        except csv.Error as e:
            reason = str(e).partition(" - ")[0]  # the rest is for programmers
            raise SystemExit(
                f"{where}: {reason}, in the row that begins there; put quotes around a text with "
                "quotes or line ends (a lone CR is one), and write its own quotes twice")
        if fields is None:
            return
        if not fields:  # an empty line
            continue
        # In many .tsv files quotes are text. There the row could run on to the next quote.
        if delimiter == "\t" and "\t" in "".join(fields):
            raise SystemExit(
                f"{where}: a tab inside a field, in the row that begins there; make it .jsonl")
        if columns is None:
            columns = fields
            names = [name for name in columns if name]  # an unnamed one can't be asked for
            if len(set(names)) < len(names):
                raise SystemExit(f"{where}: two columns have the same name; rename one of them")
            continue
        # A delimiter at the end of each row is common; more text than columns is a mistake.
        if any(fields[len(columns):]):
            raise SystemExit(
                f"{where}: {len(fields)} fields for {len(columns)} columns, {str(columns)[:60]}; "
                f"put quotes around a text that has a {delimiter!r}")
        yield where, {**dict.fromkeys(columns), **dict(zip(columns, fields))}


# ---------- Parquet and the hub -----------------------------------------------


def rows_of_datasets(source, path, **options):
    """The rows of datasets.load_dataset(path, **options)."""
    import datasets
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # rows() prints errors
    found = datasets.load_dataset(path, **options, streaming=True)
    for number, row in enumerate(found, 1):
        yield f"{source}: row {number}", row
