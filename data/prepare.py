r"""
Turn any text into train.bin and val.bin: local files, or a data set of Hugging Face's hub.

    python data/prepare.py my_data notes/*.txt                          # -> data/my_data/
    python data/prepare.py my_data chats.jsonl --template='Q: {question}\nA: {answer}'
    python data/prepare.py my_data a.parquet --column=body --tokenizer=HuggingFaceTB/SmolLM2-135M
    python data/prepare.py fineweb HuggingFaceFW/fineweb-edu --subset=sample-10BT --limit=10000

A .txt file is one document; in .jsonl, .json, .parquet and .csv files each row is one.
Documents are streamed through all cores, so memory stays flat. Each ends with an
end-of-text token. Vocabularies above 65,535 make files of uint32 with llm.c's header,
others of uint16 without one.

A hash of its text puts a document into val.bin, whatever the order, the limit or the
workers. If that leaves a split with fewer than 10,000 tokens, val.bin is instead the last
tenth of all tokens.
"""

import glob
import hashlib
import json
import os
import re
import shutil
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parent))
from data.tokenizer import TOKENIZER, encoder  # noqa: E402

# llm.c's header, as in loader.py, which would import torch.
HEADER_BYTES = 256 * 4
UINT32 = 20240801

# {a file's ending: the name of what reads it in `datasets`}
KINDS = {
    ".txt": None,
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
}
MANY = 10_000  # tokens: a split of fewer says little


# ---------- documents ---------------------------------------------------------


def documents(sources, template, hub):
    """Yield the documents of local files or hub data sets. SystemExit if one cannot be
    read. hub: what to load of a hub data set, as `datasets` calls it."""
    for source in sources:
        try:
            for row in rows(source, hub):
                yield fill(template, row, source)
        except Exception as e:  # a dozen kinds: no network, no such data set, a damaged file
            reason = " ".join(str(e).split())[:300]
            raise SystemExit(
                f"{source}: {type(e).__name__}: {reason}; a file must be whole, and UTF-8; "
                "for a hub data set check the name and the network")


def rows(source, hub):
    """Yield the rows of one file or hub data set, each {column: value}."""
    kind = os.path.splitext(source)[1].lower()
    is_local = os.path.exists(source)
    # What is neither here nor named like a file is a hub data set.
    if is_local != (kind in KINDS):
        kinds = ", ".join(KINDS)
        raise SystemExit(f"{source}: no such file, or not a file of kind {kinds}")
    if kind == ".txt":
        with open(source, encoding="utf-8") as f:
            yield {"text": f.read()}
        return
    if is_local and os.path.getsize(source) == 0:
        return  # `datasets` would fail
    import datasets
    # documents() prints what goes wrong.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if is_local:
        hub = dict(data_files=[glob.escape(source)], split="train")
        source = KINDS[kind]
    yield from datasets.load_dataset(source, **hub, streaming=True)


def fill(template, row, source):
    """The template with the row's value for each {column}; null is empty."""
    def text(match):
        value = row.get(match[1], [])
        if not isinstance(value, (str, int, float, type(None))):
            raise SystemExit(
                f"{source}: no text in column {match[1]}; pass --column or --template for "
                f"one of {', '.join(row)}")
        return "" if value is None else str(value)

    return re.sub(r"{([^{}]+)}", text, template)


# ---------- tokens ------------------------------------------------------------


def chunks(docs):
    """Lists of about a million characters: short documents travel to a worker together,
    long ones alone."""
    chunk = []
    size = 0
    for text in docs:
        chunk.append(text)
        size += len(text)
        if size >= 1 << 20:
            yield chunk
            chunk = []
            size = 0
    yield chunk


def encode(chunk, tokenizer, dtype, val_fraction):
    """The tokens of train and those of val, as bytes; runs in a worker."""
    own = encoder(tokenizer)
    parts = bytearray(), bytearray()
    for text in chunk:
        tokens = np.array(own.encode(text), dtype)
        if tokens[-1:].tolist() != [own.end]:  # some tokenizers put it there themselves
            tokens = np.append(tokens, dtype.type(own.end))
        digest = hashlib.sha256(text.encode()).digest()
        held_out = int.from_bytes(digest[:8], "little") < val_fraction * 2**64
        parts[held_out].extend(tokens.tobytes())
    return parts


def tokenize(docs, files, workers, tokenizer, dtype, val_fraction):
    """Append the tokens of docs to train's and val's files, in order."""
    from tqdm import tqdm
    progress = tqdm(unit=" tok", unit_scale=True, delay=1)
    with ProcessPoolExecutor(workers) as pool, progress as bar:
        # A generator: a chunk is read and sent to a worker when its future is asked for.
        futures = (
            pool.submit(encode, chunk, tokenizer, dtype, val_fraction)
            for chunk in chunks(docs)
        )
        pending = list(islice(futures, 4 * workers))  # no more wait, so memory stays flat
        while pending:
            for file, tokens in zip(files, pending.pop(0).result()):
                bar.update(file.write(tokens) // dtype.itemsize)
            pending += islice(futures, 1)


def hold_out_end(train, val, fraction, offset, width):
    """Move tokens until val has the last `fraction` of them. They begin at offset, and are
    width bytes each."""
    # First all to train. What the hash held out comes last, and so stays held out.
    val.seek(offset)
    shutil.copyfileobj(val, train)
    tokens = (train.tell() - offset) / width
    start = offset + width * round((1 - fraction) * tokens)
    # Then the end of them to val.
    val.truncate(val.seek(offset))
    train.seek(start)
    shutil.copyfileobj(train, val)
    train.truncate(start)


# ---------- files -------------------------------------------------------------


def write(docs, out, tokenizer, val_fraction, end_fraction, workers):
    """Write out's files. val.bin gets val_fraction of the documents, or, if that leaves a
    split with few tokens, the last end_fraction of all tokens."""
    own = encoder(tokenizer)  # here first: a mistake is then one line, not one a worker
    large = own.vocab_size > 65535
    dtype = np.dtype(np.uint32 if large else np.uint16)
    offset = HEADER_BYTES if large else 0
    how = ""
    with all_or_none(out) as tmp:
        with open(tmp / "train.bin", "w+b") as train, open(tmp / "val.bin", "w+b") as val:
            files = (train, val)
            for file in files:
                file.write(bytes(offset))
            tokenize(docs, files, workers, tokenizer, dtype, val_fraction)
            if min(train.tell(), val.tell()) < offset + MANY * dtype.itemsize:
                hold_out_end(train, val, end_fraction, offset, dtype.itemsize)
                how = f", the last {100 * end_fraction:g}% of the text"
            ends = [file.seek(0, os.SEEK_END) for file in files]
            counts = [(end - offset) // dtype.itemsize for end in ends]
            if 0 in counts:
                raise SystemExit(
                    f"{out}: {sum(counts)} tokens leave a split empty; pass more text")
            if large:
                write_headers(files, counts)
        if own.file:  # a copy, so that the directory is whole wherever it goes
            shutil.copyfile(own.file, tmp / TOKENIZER)
            tokenizer = TOKENIZER
        meta = {"vocab_size": own.vocab_size, "tokenizer": tokenizer}
        (tmp / "meta.json").write_text(json.dumps(meta))
    print(f"{out}/train.bin: {counts[0]:,} tokens")
    print(f"{out}/val.bin: {counts[1]:,} tokens{how}")


def write_headers(files, counts):
    """llm.c's: magic, version, number of tokens."""
    if max(counts) >= 2**31:
        raise SystemExit(
            f"{max(counts):,} tokens, and the header counts to 2**31; pass a --limit")
    for file, count in zip(files, counts):
        file.seek(0)
        file.write(np.array([UINT32, 7, count], np.int32))


def write_small(out, train, val, **meta):
    """Write out's files from two lists of tokens."""
    with all_or_none(out) as tmp:
        np.array(train, np.uint16).tofile(tmp / "train.bin")
        np.array(val, np.uint16).tofile(tmp / "val.bin")
        (tmp / "meta.json").write_text(json.dumps(meta))
    print(f"{out}/train.bin: {len(train):,} tokens")
    print(f"{out}/val.bin: {len(val):,} tokens")


@contextmanager
def all_or_none(out):
    """A directory to write in. At the end its files go to `out`; none if anything fails."""
    tmp = Path(out, "prepare.tmp")
    shutil.rmtree(tmp, ignore_errors=True)  # a killed run's
    try:
        tmp.mkdir(parents=True)
        yield tmp
        for name in os.listdir(tmp):
            os.replace(tmp / name, Path(out, name))
    except OSError as e:
        reason = e.strerror or e
        raise SystemExit(
            f"cannot write {out}: {reason}; make room, or pass another --out")
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


# ---------- the command -------------------------------------------------------


def parser_of(doc):
    """A parser with the help `doc` and the option that all of these commands have."""
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    parser.error = sys.exit  # one line and exit code 1, as everywhere here
    parser.add_argument("--out", metavar="DIR", help="instead of data/<name>/")
    return parser


def main(name=None, source=None, doc=__doc__, val_fraction=0.0005, **defaults):
    """The command. Each data/<name>/prepare.py calls it with its name, source, defaults."""
    parser = parser_of(doc)
    option = parser.add_argument
    if name is None:
        option("name", help="files go to data/<name>/")
    many = "*" if source else "+"
    option("source", nargs=many, default=[source], help="files, or hub data sets")
    option("--subset", help="configuration of a hub data set")
    option("--split", default="train", help="split of a hub data set (default: train)")
    option("--column", default="text", help="column that holds the text (default: text)")
    option("--template", help=r"text of several columns, e.g. 'Q: {question}\nA: {answer}'")
    option("--tokenizer", metavar="T", default="gpt2",
           help="gpt2 (default), bytes, or a tokenizer.json, its directory or hub name")
    option("--val_fraction", type=float, help=f"default: {val_fraction} of the documents")
    option("--limit", metavar="N", type=int, default=sys.maxsize,
           help="only the first N documents")
    option("--workers", metavar="N", type=int, default=os.cpu_count(),
           help="processes (default: one a core)")
    parser.set_defaults(**defaults)
    args = parser.parse_args()

    end_fraction = 0.1
    if args.val_fraction is not None:
        val_fraction = end_fraction = args.val_fraction
    if not 0 < val_fraction < 1 or min(args.workers, args.limit) < 1:
        raise SystemExit(
            "--val_fraction must be between 0 and 1, --workers and --limit at least 1")
    template = args.template or "{" + args.column + "}"
    hub = dict(name=args.subset, split=args.split)
    docs = documents(args.source, template.replace(r"\n", "\n"), hub)
    docs = islice(filter(None, docs), args.limit)  # without empty ones
    out = args.out or HERE / (name or args.name)
    write(docs, out, args.tokenizer, val_fraction, end_fraction, args.workers)


if __name__ == "__main__":
    main()
