r"""
Turn any text into token files: local files, or data sets on the Hugging Face hub.

    python data/prepare.py my_data notes/*.txt                          # -> data/my_data/
    python data/prepare.py my_data qa.jsonl --template='Q: {question}\nA: {answer}'
    python data/prepare.py my_data a.parquet --column=body --tokenizer=HuggingFaceTB/SmolLM2-135M
    python data/prepare.py my_data HuggingFaceFW/fineweb-edu --subset=sample-100BT

In .jsonl, .ndjson, .json, .parquet, .csv and .tsv files each row is a document, and so it is in a
file of any other name that begins with an object of JSON. Any other is one document. Documents
are streamed through all cores. Each ends with an end-of-text token. Rows without text are left
out, and the last lines say how many.

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
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing import parent_process
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parent))
from data.documents import documents, render  # noqa: E402
from data.files import (  # noqa: E402
    RECORD,
    file_pattern,
    header,
    open_masks,
    open_split,
    read_record,
    shard_name,
    write_files,
)
from data.tokenizer import TOKENIZER, encoder  # noqa: E402

SPLITS = ("train", "val")
MANY = 10_000  # tokens: a smaller split gives no useful loss
CHUNK = 1 << 20  # characters that are sent to a worker together
# A shard may be a chunk longer than requested, and its header counts to 2**31.
LARGEST = 1 << 30


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
        template = args.template or "{" + args.column + "}"
        self.template = template.replace(r"\n", "\n")
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
    empty: int  # how many of them have no text
    crc: int  # of their documents


def chunks(parts, key):
    """Yield Chunks: short documents together, long ones alone. parts: [(val_fraction, documents
    with None for each row without text)]; key: the Job's."""
    rows = empty = crc = 0
    for val_fraction, docs in parts:
        found = []
        size = 0
        for document in docs:
            rows += 1
            if document is None:
                empty += 1
            else:
                found.append(document)
                text = key(document)
                size += len(text)
                crc = zlib.crc32(text.encode(), crc)
            crc = zlib.crc32(b"\xff", crc)  # ends a row; never occurs in UTF-8
            if size >= CHUNK:
                yield Chunk(found, val_fraction, rows, empty, crc)
                found = []
                size = 0
        yield Chunk(found, val_fraction, rows, empty, crc)


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
    """The tokens of train and of val, as bytes, and Encoder.seen; runs in a worker."""
    own = encoder(job.tokenizer)
    own.seen[:] = 0
    parts = bytearray(), bytearray()
    for document in chunk.documents:
        digest = hashlib.sha256(job.key(document).encode()).digest()
        held_out = int.from_bytes(digest[:8], "little") < chunk.val_fraction * 2**64
        parts[held_out].extend(job.encode(document, own).tobytes())
    return *parts, own.seen


# ---------- from tokens to files ----------------------------------------------


class Shards:
    """The tokens of train and val, on their way to the files in `out`.

    They wait in memory until a chunk brings a split to shard_tokens. Then both splits are
    written, and prepare.json records the progress. The next start continues from there; after a
    kill between the two it writes the same shard again.
    """

    def __init__(self, out, arguments, job, end_fraction):
        """arguments: a later start must have the same. end_fraction: the fraction of all tokens
        for val if it gets their end; 0 if it has its own documents. SystemExit if out has other
        data."""
        self.out = out
        self.job = job
        self.end_fraction = end_fraction
        self.full = arguments["shard_tokens"] * job.item.itemsize  # bytes
        self.waiting = {split: bytearray() for split in SPLITS}
        self.last = None  # the chunk whose tokens came last
        local = filter(os.path.exists, arguments["source"])
        self.stats = {path: [os.path.getsize(path), os.path.getmtime(path)] for path in local}
        self.record = dict(arguments=arguments, finished=False, rows=0, crc=0, shards=0,
                           tokens=dict.fromkeys(SPLITS, 0), files=[])
        begun = read_record(out)
        if not begun:
            require_no_other_data(out, {})
            return
        begun["arguments"].setdefault(TOKENIZER, arguments.get(TOKENIZER))  # old records lack it
        for key in {**begun["arguments"], **arguments}:
            if begun["arguments"].get(key) != arguments.get(key):
                raise SystemExit(
                    f"{out}: prepared with another {key}; pass the same, or move its files away "
                    "to begin again, or pass another --out")
        self.record |= {"finished": True, **begun}  # files.py's default: old records lack it

    def left(self, chunks):
        """The chunks that are not in a file yet; None if an earlier start finished. SystemExit if
        a file is missing, or the documents have changed since."""
        rows = self.record["rows"]
        if self.record["finished"]:
            for split in SPLITS:
                open_masks(open_split(self.out, split))
            if self.stats == self.record.get("stats", self.stats):
                return None
            for self.last in chunks:  # the sources may only have been touched
                pass
        elif rows:
            print(f"{self.out}: going on after {self.record['shards']} shards and {rows:,} rows")
            self.last = next((chunk for chunk in chunks if chunk.rows >= rows), None)
        found = (self.last.rows, self.last.crc) if self.last else (0, 0)
        if found != (rows, self.record["crc"]):
            raise SystemExit(
                f"{self.out}: the documents are not those of the files here; move its files away "
                "to begin again, or pass another --out")
        return None if self.record["finished"] else chunks

    def add(self, chunk, parts):
        """Add a chunk's tokens of train and of val, and write a shard if it is full."""
        for waiting, part in zip(self.waiting.values(), parts):
            waiting.extend(part)
        self.last = chunk
        if any(len(waiting) >= self.full for waiting in self.waiting.values()):
            self.write({})

    def finish(self, files):
        """Write the waiting tokens, and files, {name: parts}."""
        self.write(files, is_last=True)
        shards = self.record["shards"]
        for split, count in self.record["tokens"].items():
            if shards:
                print(f"{self.out}: {count:,} tokens of {split} in {shards} shards")
            else:
                print(f"{self.out}/{split}.bin: {count:,} tokens")
        if self.last.empty:
            print(f"{self.out}: documents without text or answer, left out: {self.last.empty:,}")

    def write(self, files, is_last=False):
        """Write the waiting tokens as a shard, or as train.bin and val.bin if they are all."""
        record = self.record
        if not record["shards"]:
            self.hold_out()
        if not record["rows"]:
            # After a kill, the next start must know whose files these are.
            write_files(self.out, {RECORD: [json.dumps(record).encode()]})
        is_all = is_last and not record["shards"]
        if not is_all and any(self.waiting.values()):
            record["shards"] += 1
        name = Path(record["arguments"]["name"]).name
        for split, waiting in self.waiting.items():
            file = f"{split}.bin" if is_all else shard_name(name, split, record["shards"])
            if waiting:
                files |= self.contents(file, split, with_header=not is_all)
        # (stats of this start: after a kill a source may have been mended.)
        record |= dict(rows=self.last.rows, crc=self.last.crc, stats=self.stats, finished=is_last)
        write_files(self.out, {**files, RECORD: [json.dumps(record).encode()]})
        self.waiting = {split: bytearray() for split in SPLITS}

    def contents(self, file, split, with_header):
        """{name: parts} of the split's waiting tokens, and of the files next to them."""
        job = self.job
        arrays = job.files(np.frombuffer(self.waiting[split], job.item))
        self.record["files"] = list(arrays)
        self.record["tokens"][split] += len(arrays[".bin"])
        files = {}
        for extension, array in arrays.items():
            parts = [np.ascontiguousarray(array)]
            # nanoGPT's files are uint16 and have no header.
            if extension == ".bin" and (with_header or job.dtype != np.uint16):
                parts.insert(0, header(job.dtype, len(array)))
            files[Path(file).with_suffix(extension).name] = parts
        return files

    def hold_out(self):
        """If a split has few tokens before the first shard, give val the end of all tokens."""
        train, val = self.waiting.values()
        size = self.job.item.itemsize
        if self.end_fraction and min(len(train), len(val)) < MANY * size:
            # First move all to train. Text held out by the hash goes last, so it stays held out.
            train.extend(val)
            count = len(train) // size
            window = self.job.window
            first = round((1 - self.end_fraction) * count)
            first -= first % window
            first = min(max(first, window), count - window)
            # Then move the end to val.
            val[:] = train[first * size:]
            del train[first * size:]
            percent = 100 * self.end_fraction
            print(f"{self.out}: few documents, so val has the last {percent:g}% of the text")
        if not train or not val:
            count = len(train + val) // size
            raise SystemExit(f"{self.out}: {count} tokens leave a split empty; pass more text")


def write_small(out, train, val, **meta):
    """Write out's files from two lists of tokens. SystemExit if it has other files."""
    out = Path(out).expanduser()
    contents = {
        "train.bin": np.array(train, np.uint16).tobytes(),
        "val.bin": np.array(val, np.uint16).tobytes(),
        "meta.json": json.dumps(meta).encode(),
    }
    with output_directory(out):
        require_no_other_data(out, contents)
        write_files(out, {file: [content] for file, content in contents.items()})
    print(f"{out}/train.bin: {len(train):,} tokens")
    print(f"{out}/val.bin: {len(val):,} tokens")


@contextmanager
def output_directory(out):
    """Make the directory, and remove it again if nothing was written. Inside, Ctrl-C and disk
    errors become a SystemExit."""
    is_new = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=out).close()  # find out at once if it is not writable
        yield
    except KeyboardInterrupt:
        raise SystemExit(f"{out}: stopped; start it again, and it goes on")
    except OSError as e:
        reason = e.strerror or e
        raise SystemExit(
            f"cannot write {out}: {reason}; make room and start it again, or pass another "
            "--out")
    finally:
        if is_new and out.is_dir() and not os.listdir(out):
            out.rmdir()


def require_no_other_data(out, contents):
    """SystemExit if out has a data set. Files with exactly these contents don't count."""
    others = []
    for file in sorted(os.listdir(out)):
        tokens = file.replace(".mask", ".bin")
        is_data = file == RECORD
        is_data |= any(file_pattern(split).fullmatch(tokens) for split in SPLITS)
        if file in contents:
            is_data = contents[file] != (out / file).read_bytes()
        if is_data:
            others.append(file)
    if others:
        raise SystemExit(
            f"{out}: another data set is here ({', '.join(others[:3])}); move its files "
            "away, or pass another --out")


# ---------- the command -------------------------------------------------------


def parser_of(doc):
    """A parser with the help text `doc` and the option that all of these commands share."""
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    parser.error = sys.exit  # one line and exit code 1, as everywhere here
    parser.add_argument("--out", metavar="DIR", help="instead of data/<name>/")
    return parser


def main(name=None, source=None, doc=__doc__, hash_fraction=0.0005, job_of=Job,
         more_options=lambda option: None, **defaults):
    """The command; returns the directory. Each data/<name>/prepare.py calls it with its name,
    source and defaults. job_of: makes a Job from (args, encoder); more_options: a function of
    parser.add_argument."""
    parser = parser_of(doc)
    if name is None:
        parser.add_argument("name", type=os.path.expanduser, help="files go to data/<name>/")
    many = "*" if source else "+"
    parser.add_argument("source", nargs=many, default=[source], type=os.path.expanduser,
                        help="files, or hub data sets")
    add_options(parser, hash_fraction)
    more_options(parser.add_argument)
    parser.set_defaults(**defaults)
    args = parser.parse_intermixed_args()
    args.name = name or args.name
    args.hash_fraction = args.val_fraction or hash_fraction

    require_sound(args)
    own = encoder(args.tokenizer)  # here first, so that a mistake is one line, not one per worker
    job = job_of(args, own)
    out = Path(args.out or HERE / args.name).expanduser()  # shells leave the ~ of --out=~/x
    with output_directory(out):
        prepare(args, job, own, out)
    return out


def add_options(parser, hash_fraction):
    option = parser.add_argument
    option("--subset", help="configuration of a hub data set")
    option("--split", default="train", help="split of a hub data set (default: train)")
    option("--val_split", metavar="S", help="split of a hub data set to use as val")
    option("--column", default="text", help="column that holds the text (default: text)")
    option("--template", help=r"text of several columns, e.g. 'Q: {question}\nA: {answer}'")
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


def require_sound(args):
    """SystemExit if a number is out of range, or options don't go together."""
    if args.val_fraction is not None and not 0 < args.val_fraction < 1:
        raise SystemExit(f"--val_fraction={args.val_fraction} must be above 0 and below 1")
    for key in ("limit", "shard_tokens", "workers"):
        if getattr(args, key) < 1:
            raise SystemExit(f"--{key}={getattr(args, key)} must be at least 1")
    if args.shard_tokens > LARGEST:
        raise SystemExit(f"--shard_tokens={args.shard_tokens} must be at most 2**30, {LARGEST}")
    if args.val_split and (args.val_fraction or any(map(os.path.exists, args.source))):
        raise SystemExit(
            f"--val_split={args.val_split}: it goes with hub data sets, not with files or "
            "--val_fraction; pass --val_split= for those")


def prepare(args, job, own, out):
    """Tokenize the documents of args, or the rest of them after an earlier start. own: the
    Encoder of args.tokenizer."""
    end_fraction = 0 if args.val_split else args.val_fraction or 0.1
    shards = Shards(out, comparable(args, own), job, end_fraction)
    train = documents(args, args.split, job.document, args.limit)
    parts = [(args.hash_fraction, train)]
    if args.val_split:  # val comes first, so that the first shard has it
        parts = [(1, documents(args, args.val_split, job.document)), (0, train)]
    left = shards.left(chunks(parts, job.key))
    if left is None:
        print(f"{out}: prepared already with these arguments")
        return
    seen = np.zeros(2, int)
    from tqdm import tqdm
    with tqdm(unit=" tok", unit_scale=True, delay=1) as bar:
        for chunk, (*tokens, more) in tokenize(left, args.workers, job):
            shards.add(chunk, tokens)
            seen += more
            bar.update(sum(map(len, tokens)) // job.item.itemsize)

    # Copy the tokenizer's files too, so that the directory is complete when it moves.
    files = {name: [path.read_bytes()] for name, path in own.files.items()}
    meta = {"vocab_size": own.vocab_size, "tokenizer": own.name, **job.meta}
    files["meta.json"] = [json.dumps(meta).encode()]
    shards.finish(files)
    if seen[1]:
        print(f"{out}: about {100 * seen[1] / seen[0]:.3g}% of the characters are lost: this "
              "tokenizer has its unknown token for them, or none; a byte-level one loses nothing")


def comparable(args, own):
    """The arguments that determine the data set, and a CRC of the tokenizer's files; a later start
    must have the same."""
    files = b"".join(path.read_bytes() for path in own.files.values())
    arguments = {**vars(args), "source": [], TOKENIZER: zlib.crc32(files)}
    for source in args.source:
        is_local = os.path.exists(source)
        arguments["source"].append(os.path.abspath(source) if is_local else source)
    for key in ("out", "workers"):  # these may change
        del arguments[key]
    return arguments


if __name__ == "__main__":
    main()
