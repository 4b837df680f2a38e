r"""
Turn any text into token files: local files, or data sets on the Hugging Face hub.

    python data/prepare.py my_data notes/*.txt                          # -> data/my_data/
    python data/prepare.py my_data qa.jsonl --template=$'Q: {question}\nA: {answer}'
    python data/prepare.py my_data a.parquet --column=body --tokenizer=HuggingFaceTB/SmolLM2-135M
    python data/prepare.py my_data HuggingFaceFW/fineweb-edu --subset=sample-100BT

In .jsonl, .ndjson, .json, .parquet, .csv and .tsv files each row is a document; any other file is
one document. Documents are streamed through all cores. Each ends with an end-of-text token. Rows
without text are left out.

A data set smaller than a shard becomes train.bin and val.bin, as in nanoGPT: uint16, or uint32
after llm.c's header if the vocabulary is above 65,535. A larger one becomes shards with that
header, <name>_train_000001.bin and so on, each with a small val shard. If it is killed, start the
same command again: it continues after the last shard.

A hash of a document's text puts it into train or val, whatever the order, the limit or the
number of workers. If a split has fewer than 10,000 tokens when the first shard is full, or at
the end, val gets the last tenth of all tokens so far instead. If a hub data set has its own
validation split, use it: --val_split=validation.
"""

import hashlib
import json
import os
import signal
import sys
import threading
import zlib
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from multiprocessing import parent_process
from pathlib import Path

import numpy as np

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parent))
from data.documents import documents, render  # noqa: E402
from data.files import RECORD, header, read_record, write_files  # noqa: E402
from data.tokenizer import encoder  # noqa: E402

SPLITS = ("train", "val")
MANY = 10_000  # tokens: a smaller split gives no useful loss
CHUNK = 1 << 20  # characters that are sent to a worker together


# ---------- from rows to tokens -----------------------------------------------


class Job:
    """Turns a row into a document, its tokens, and their files. Each worker has a copy. A
    command with other documents or files subclasses Job, and passes main() a function that
    makes it."""

    window = 1  # this many tokens stay together if val gets the end of all tokens
    meta = {}  # more entries for meta.json

    def __init__(self, args, own):
        """own: the Encoder of args.tokenizer."""
        self.tokenizer = args.tokenizer
        self.template = args.template or "{" + args.column + "}"
        self.dtype = np.dtype(np.uint32 if own.vocab_size > 65535 else np.uint16)
        self.item = self.dtype  # of a token in memory

    def document(self, row, where):
        """A row's document, here its text; None if it has none. where: for errors."""
        return render(self.template, row, where) or None

    def key(self, document):
        """A string that identifies the document: its hash puts it into train or val."""
        return document

    def encode(self, document, own):
        """A document's tokens, with the end-of-text token, as an array of self.item."""
        tokens = np.array(own.encode(document), self.dtype)
        if tokens[-1:].tolist() != [own.end]:  # some tokenizers add it themselves
            tokens = np.append(tokens, self.dtype.type(own.end))
        return tokens

    def files(self, items):
        """{extension: array} of the files for these tokens, including .bin."""
        return {".bin": items}


@dataclass
class Chunk:
    """Documents that one worker tokenizes together."""

    documents: list
    val_fraction: float  # of them
    # Over all rows up to its end, including earlier chunks:
    rows: int
    crc: int  # of their documents


def chunks(parts, key):
    """Yield Chunks: short documents together, long ones alone. parts: [(val_fraction, documents
    with None for each row without text)]; key: the Job's."""
    rows = crc = 0
    for val_fraction, docs in parts:
        found = []
        size = 0
        for document in docs:
            rows += 1
            if document is not None:
                found.append(document)
                text = key(document)
                size += len(text)
                crc = zlib.crc32(text.encode(), crc)
            crc = zlib.crc32(b"\xff", crc)  # ends a row; never occurs in UTF-8
            if size >= CHUNK:
                yield Chunk(found, val_fraction, rows, crc)
                found = []
                size = 0
        yield Chunk(found, val_fraction, rows, crc)


def tokenize(chunks, workers, job):
    """Yield (chunk, encode()'s result), in order."""
    with ProcessPoolExecutor(workers, initializer=die_with_parent) as pool:
        # A generator: each chunk is read, and sent to a worker, only on demand.
        submitted = ((chunk, pool.submit(encode, chunk, job)) for chunk in chunks)
        pending = list(islice(submitted, 4 * workers))  # a limit keeps memory flat
        while pending:
            chunk, tokens = pending.pop(0)
            yield chunk, tokens.result()
            pending += islice(submitted, 1)


def die_with_parent():
    """In a worker: leave Ctrl-C to prepare.py, and exit if it is killed, since no more chunks
    will come."""
    def wait():
        parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=wait, daemon=True).start()


def encode(chunk, job):
    """The tokens of train and of val, as bytes; runs in a worker."""
    own = encoder(job.tokenizer)
    parts = bytearray(), bytearray()
    for document in chunk.documents:
        digest = hashlib.sha256(job.key(document).encode()).digest()
        number = int.from_bytes(digest[:8], "little")
        held_out = number < chunk.val_fraction * 2**64
        parts[held_out].extend(job.encode(document, own).tobytes())
    return parts


# ---------- from tokens to files ----------------------------------------------


# Tokens wait in memory until a split has shard_tokens. Then a shard of each split is written, and
# after them prepare.json, which records the progress. The next start continues from there. After
# a kill between the two it writes the same shards again.


def open_record(out, arguments):
    """The content of prepare.json, or that of a new one. SystemExit if out has other data.
    arguments: those that determine the data set; a later start must have the same."""
    tokens = dict.fromkeys(SPLITS, 0)
    new = dict(
        arguments=arguments, finished=False, rows=0, crc=0, shards=0, tokens=tokens, stats=None)
    record = read_record(out)
    if not any(out.glob("*.bin")):
        record = new  # an earlier start has written no tokens
    elif not new.keys() <= record.keys():  # none, or of another version of this file
        raise SystemExit(f"{out}: another data set is here; move it away, or pass another --out")
    for key, found in record["arguments"].items():
        if found != arguments.get(key):
            raise SystemExit(
                f"{out}: prepared with {key}={found}, not {arguments.get(key)}; pass the same, or "
                "move its files away to begin again, or pass another --out")
    return record


def left(chunks, record, out):
    """The chunks that are not in a file yet. SystemExit if the documents before them have changed
    since they were written, or if there are more now than when it finished."""
    rows = record["rows"]
    if rows:
        print(f"{out}: reading again the {rows:,} rows that its files have")
        last = next((chunk for chunk in chunks if chunk.rows >= rows), None)
        is_same = last and (last.rows, last.crc) == (rows, record["crc"])
        if not is_same or (record["finished"] and any(chunk.documents for chunk in chunks)):
            raise SystemExit(
                f"{out}: the documents are not those of the files here; move its files away to "
                "begin again, or pass another --out")
    return chunks


def write_shard(out, job, waiting, record, others, is_last):
    """Write the waiting tokens as a shard, or as train.bin and val.bin if they are all.
    waiting: {split: bytes}; others: {name: bytes} of files to write with them."""
    is_all = is_last and not record["shards"]
    if not is_all and any(waiting.values()):
        record["shards"] += 1
    name = Path(record["arguments"]["name"]).name
    files = {name: [content] for name, content in others.items()}
    for split, items in waiting.items():
        if not items:
            continue
        stem = split
        if not is_all:
            stem = f"{name}_{split}_{record['shards']:06d}"
        arrays = job.files(np.frombuffer(items, job.item))
        for extension, array in arrays.items():
            files[stem + extension] = [np.ascontiguousarray(array)]
        tokens = arrays[".bin"]
        # nanoGPT's files are uint16 and have no header.
        if not is_all or job.dtype != np.uint16:
            files[f"{stem}.bin"].insert(0, header(job.dtype, len(tokens)))
        record["tokens"][split] += len(tokens)
        record["files"] = list(arrays)
    record["finished"] = is_last
    write_files(out, {**files, RECORD: [json.dumps(record).encode()]})


def hold_out(train, val, job, fraction):
    """If a split has few tokens before the first shard, give val the end of all tokens.
    fraction: of all tokens; 0 if val has its own documents."""
    size = job.item.itemsize
    if fraction and min(len(train), len(val)) < MANY * size:
        # First move all to train. Text held out by the hash goes last, so it stays held out.
        train.extend(val)
        count = len(train) // size
        window = job.window
        first = round((1 - fraction) * count)
        first -= first % window
        first = min(max(first, window), count - window)
        # Then move the end to val.
        val[:] = train[first * size:]
        del train[first * size:]
        print(f"few documents, so val has the last {100 * fraction:g}% of the text")
    if not train or not val:
        raise SystemExit(f"{len(train + val)} bytes leave a split empty; pass more text")


def write_small(out, train, val, **meta):
    """Write out's files from two lists of tokens. SystemExit if it has another data set."""
    out = Path(out).expanduser()
    contents = {
        "meta.json": json.dumps(meta).encode(),  # first: without it a run takes GPT-2's vocabulary
        "train.bin": np.array(train, np.uint16).tobytes(),
        "val.bin": np.array(val, np.uint16).tobytes(),
    }
    for path in out.glob("*.bin"):
        if path.read_bytes() != contents.get(path.name):
            raise SystemExit(f"{out}: another data set is here; pass another --out")
    out.mkdir(parents=True, exist_ok=True)
    write_files(out, {name: [content] for name, content in contents.items()})
    for split, tokens in (("train", train), ("val", val)):
        print(f"{out}: {len(tokens):,} tokens of {split}")


# ---------- the command -------------------------------------------------------


def parser_of(doc):
    """A parser with the help text `doc` and the option that all of these commands share."""
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    parser.error = sys.exit  # one line and exit code 1, as everywhere here
    parser.add_argument("--out", metavar="DIR", help="instead of data/<name>/")
    return parser


def main(name=None, source=None, doc=__doc__, hash_fraction=0.0005, job_of=Job,
         more_options=lambda option: None):
    """The command; returns the directory. data/openwebtext/prepare.py calls it with its name and
    source. job_of: makes a Job from (args, encoder); more_options: a function of
    parser.add_argument."""
    parser = parser_of(doc)
    if name is None:
        parser.add_argument("name", type=os.path.expanduser, help="files go to data/<name>/")
    many = "*" if source else "+"
    parser.add_argument("source", nargs=many, default=[source], type=os.path.expanduser,
                        help="files, or hub data sets")
    add_options(parser, hash_fraction)
    more_options(parser.add_argument)
    args = parser.parse_intermixed_args()
    args.name = name or args.name
    args.hash_fraction = hash_fraction if args.val_fraction is None else args.val_fraction

    if name is None and os.path.isfile(args.name):
        raise SystemExit(f"{args.name} is a file; the data set's name comes before the files")
    if r"\n" in (args.template or ""):
        print(r"--template: \n stays a backslash and an n; in bash $'\n' is a line end")
    if args.limit < 1 or not 0 < args.hash_fraction < 1:
        raise SystemExit("--limit must be at least 1, and --val_fraction above 0 and below 1")
    has_files = any(map(os.path.exists, args.source))
    if args.val_split and (args.val_fraction or has_files):
        raise SystemExit(
            f"--val_split={args.val_split}: it goes with hub data sets, not with files or "
            "--val_fraction; pass --val_split= for those")
    own = encoder(args.tokenizer)  # here first, so that a mistake is one line, not one per worker
    out = Path(args.out or HERE / args.name).expanduser()  # shells leave the ~ of --out=~/x
    out.mkdir(parents=True, exist_ok=True)
    prepare(args, job_of(args, own), own, out)
    return out


def add_options(parser, hash_fraction):
    option = parser.add_argument
    option("--subset", help="configuration of a hub data set")
    option("--split", default="train", help="split of a hub data set (default: train)")
    option("--val_split", metavar="S", help="split of a hub data set to use as val")
    option("--column", default="text", help="column that holds the text (default: text)")
    option("--template", help=r"text of several columns, e.g. $'Q: {question}\nA: {answer}'; "
           r"backslashes stay (in bash $'\n' is a line end)")
    option("--tokenizer", metavar="T", default="gpt2", type=os.path.expanduser,
           help="gpt2 (default), bytes, or a tokenizer.json, its directory or hub name")
    option("--val_fraction", metavar="F", type=float,
           help=f"fraction of documents for val (default: {hash_fraction}), or of tokens if "
                "val gets the end of them (default: 0.1)")
    option("--limit", metavar="N", type=int, default=sys.maxsize,
           help="only the first N documents")
    option("--shard_tokens", metavar="N", type=int, default=100_000_000,
           help="tokens per shard, rounded up to a whole chunk (default: 100 million)")
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # Slurm or taskset may leave fewer
        cores = len(os.sched_getaffinity(0))
    option("--workers", metavar="N", type=int, default=cores,
           help=f"processes (default: one per core, here {cores})")


def prepare(args, job, own, out):
    """Tokenize the documents of args, or the rest of them after an earlier start. own: the
    Encoder of args.tokenizer."""
    from tqdm import tqdm
    record = open_record(out, comparable(args, own))
    local = [path for path in args.source if os.path.exists(path)]
    stats = {path: [os.path.getsize(path), os.path.getmtime(path)] for path in local}
    train = documents(args, args.split, job.document, args.limit)
    parts = [(args.hash_fraction, train)]
    end_fraction = args.val_fraction or 0.1
    if args.val_split:  # val comes first, so that the first shard has it
        parts = [(1, documents(args, args.val_split, job.document)), (0, train)]
        end_fraction = 0
    rest = chunks(parts, job.key)
    if not record["finished"] or record["stats"] != stats:
        rest = left(rest, record, out)
    if record["finished"]:
        print(f"{out}: prepared already with these arguments")
        return
    # After a kill, the next start must know whose files these are.
    record["stats"] = stats
    write_files(out, {RECORD: [json.dumps(record).encode()]})

    waiting = {split: bytearray() for split in SPLITS}
    full = args.shard_tokens * job.item.itemsize
    with tqdm(unit="B", unit_scale=True, delay=1) as bar:
        for chunk, tokens in tokenize(rest, args.workers, job):
            for split, part in zip(SPLITS, tokens):
                waiting[split].extend(part)
                bar.update(len(part))
            record.update(rows=chunk.rows, crc=chunk.crc)
            longest = max(map(len, waiting.values()))
            if longest >= full:
                if not record["shards"]:
                    hold_out(*waiting.values(), job, end_fraction)
                write_shard(out, job, waiting, record, {}, is_last=False)
                waiting = {split: bytearray() for split in SPLITS}
    if not record["shards"]:
        hold_out(*waiting.values(), job, end_fraction)

    # Copy the tokenizer's files too, so that the directory is complete when it moves.
    meta = {"vocab_size": own.vocab_size, "tokenizer": own.name, **job.meta}
    if own.files:  # tokenizer.json is the name of many; a chat model's differs in other parts
        vocab = json.loads(own.files["tokenizer.json"])["model"]["vocab"]
        meta["vocab_crc"] = zlib.crc32(json.dumps(vocab, sort_keys=True).encode())
    others = {**own.files, "meta.json": json.dumps(meta).encode()}
    write_shard(out, job, waiting, record, others, is_last=True)
    for split, count in record["tokens"].items():
        print(f"{out}: {count:,} tokens of {split}")


def comparable(args, own):
    """The arguments that determine the data set, and a CRC of the tokenizer's files: a later start
    must have the same."""
    crc = zlib.crc32(b"".join(own.files.values()))
    arguments = {**vars(args), "source": [], "tokenizer_crc": crc}
    for source in args.source:
        if os.path.exists(source):
            source = os.path.abspath(source)
        arguments["source"].append(source)
    del arguments["out"]
    del arguments["workers"]
    return arguments


if __name__ == "__main__":
    main()
