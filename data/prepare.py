r"""
Turn any text into files of tokens: local files, or data sets of Hugging Face's hub.

    python data/prepare.py my_data notes/*.txt                          # -> data/my_data/
    python data/prepare.py my_data chats.jsonl --template='Q: {question}\nA: {answer}'
    python data/prepare.py my_data a.parquet --column=body --tokenizer=HuggingFaceTB/SmolLM2-135M
    python data/prepare.py my_data HuggingFaceFW/fineweb-edu --subset=sample-100BT
    python data/prepare.py my_data chats.jsonl --chat --tokenizer=Qwen/Qwen3-0.6B

In .jsonl, .ndjson, .json, .parquet, .csv and .tsv files each row is a document. Any other file
is one document, of text. Documents are streamed through all cores. Each ends with an end-of-text
token. Rows without text are left out, and the last lines say how many.

A data set smaller than a shard becomes train.bin and val.bin, as nanoGPT's: uint16, or uint32
behind llm.c's header if the vocabulary is above 65,535. A larger one becomes shards with that
header, <name>_train_000001.bin and so on. A shard is written as soon as it is full. After a
kill start the same command again: it goes on after the last shard.

A hash of its text puts a document into train or val, whatever the order, the limit or the
number of workers. If a split has fewer than 10,000 tokens when the first shard is full, or at
the end, val gets the last tenth of all tokens until then instead.

With --chat, --learn or --window the model learns only some of the tokens. Then beside each
.bin lies a .mask: one byte per token, 1 if it is learned.
"""

import hashlib
import json
import os
import re
import signal
import sys
import threading
import zlib
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing import parent_process
from pathlib import Path
from tempfile import TemporaryFile

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the next imports: no traceback

import numpy as np

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parent))
from data.documents import documents, up_to  # noqa: E402
from data.files import (  # noqa: E402
    RECORD,
    STATE,
    extra,
    file_pattern,
    header,
    open_masks,
    open_split,
    read_record,
    shard_name,
    write_files,
)
from data.tokenizer import encoder  # noqa: E402

SPLITS = ("train", "val")
MANY = 10_000  # tokens: a smaller split gives no useful loss
CHUNK = 1 << 20  # characters that travel to a worker together


# ---------- tokens ------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """How documents become tokens; every worker has it."""

    tokenizer: str  # as the user names it
    dtype: np.dtype  # of a token
    val_fraction: float
    has_mask: bool = False
    window: int = 1  # each document begins at a multiple of it

    @property
    def item(self):
        """The type of a token in memory; with a mask it has two fields."""
        if self.has_mask:
            return np.dtype([("token", self.dtype), ("learned", np.uint8)])
        return self.dtype


@dataclass
class Chunk:
    """Rows that one worker tokenizes together."""

    rows: int
    empty: int  # how many of them have no text
    place: tuple  # of the last row, as documents() yields it
    crc: int  # of its text


def tokenize(docs, workers, job):
    """Yield (Chunk, tokens of train and of val as bytes), in the order of docs."""
    with ProcessPoolExecutor(workers, initializer=end_as_prepare_ends) as pool:
        def submit(rows, place):
            chunk = Chunk(len(rows), rows.count(None), place, text_crc(rows[-1]))
            return chunk, pool.submit(encode, rows, job)

        # A generator: a chunk is read, and sent to a worker, when this asks for it.
        submitted = (submit(rows, place) for rows, place in chunks(docs))
        pending = list(islice(submitted, 4 * workers))  # at most so many, so memory stays flat
        while pending:
            chunk, tokens = pending.pop(0)
            yield chunk, tokens.result()
            pending += islice(submitted, 1)


def chunks(docs):
    """Yield (documents, place of the last): short documents together, long ones alone."""
    found = []
    size = 0
    for place, document in docs:
        found.append(document)
        size += len(document.key) if document else 0
        if size >= CHUNK:
            yield found, place
            found = []
            size = 0
    if found:
        yield found, place


def text_crc(document):
    return zlib.crc32(document.key.encode()) if document else 0


def end_as_prepare_ends():
    """In a worker: leave Ctrl-C to prepare.py, and end if that is killed, since no more chunks
    will come."""
    def wait():
        parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=wait, daemon=True).start()


def encode(rows, job):
    """The tokens of train and those of val, as bytes; runs in a worker."""
    own = encoder(job.tokenizer)
    parts = bytearray(), bytearray()
    for row in filter(None, rows):
        digest = hashlib.sha256(row.key.encode()).digest()
        held_out = int.from_bytes(digest[:8], "little") < job.val_fraction * 2**64
        for document in row.documents(own):
            items = items_with_mask if job.has_mask else items_of
            parts[held_out].extend(items(document, own, job).tobytes())
    return parts


def items_of(document, own, job):
    """A document's tokens, with the end-of-text token."""
    tokens = np.array(own.encode(document.text), job.dtype)
    if tokens[-1:].tolist() != [own.end]:  # some tokenizers put it there themselves
        tokens = np.append(tokens, job.dtype.type(own.end))
    return tokens


def items_with_mask(document, own, job):
    """A document's tokens and mask. The tokens are those of the whole text: some tokenizers
    split a part of it differently when it stands alone."""
    text = document.text
    spans = document.spans or [(0, len(text))]
    ids, places = own.spans(text, add_special_tokens=not document.has_special_tokens)
    ids = list(ids)
    learned = overlaps(places, spans, len(text))
    if not document.has_special_tokens:
        if ids[-1:] != [own.end]:
            ids.append(own.end)
            learned.append(False)
        learned[-1] = spans[-1][1] == len(text)
    padding = -len(ids) % job.window
    items = np.empty(len(ids) + padding, job.item)
    items["token"] = ids + padding * [own.end]
    items["learned"] = learned + padding * [False]
    if job.window > 1:
        items["learned"][0] = False  # it would be the last target of the window before
    return items


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


# ---------- files -------------------------------------------------------------


@dataclass
class Progress:
    """What prepare.state says, besides the tokens that wait."""

    arguments: dict
    shards: dict  # {split: how many have been written}
    documents: int = 0  # how many have been read
    empty: int = 0  # how many rows without text were among them
    place: tuple = (0, 0)  # of the last row, as documents() yields it
    checksum: int = 0  # of its text
    learned: int = 0  # how many tokens are learned, with a mask


class Tokens:
    """The tokens of train and val, on their way to the files in `out`.

    They wait in memory until they fill a shard. When one has been written, prepare.state
    gets those that still wait, and the progress. The next start goes on from there. After a
    kill between the two it writes the same shard once more.
    """

    def __init__(self, out, arguments, job, end_fraction):
        """arguments: a later start must have the same. SystemExit if it has not, or if out
        has another data set."""
        self.out = out
        self.job = job
        self.end_fraction = end_fraction  # of all tokens, if val gets the end of them
        self.shard_tokens = arguments["shard_tokens"]
        self.waiting = {split: bytearray() for split in SPLITS}
        self.progress = Progress(arguments, shards=dict.fromkeys(SPLITS, 0))
        if (out / STATE).exists():
            self.load()
        else:
            require_no_other_data(out, {})

    def save(self):
        state = asdict(self.progress)
        state["waiting"] = [len(waiting) for waiting in self.waiting.values()]
        line = json.dumps(state) + "\n"
        write_files(self.out, {STATE: [line.encode(), *self.waiting.values()]})

    def load(self):
        with open(self.out / STATE, "rb") as f:
            state = json.loads(f.readline())
            for waiting, size in zip(self.waiting.values(), state.pop("waiting")):
                waiting.extend(f.read(size))
        begun = state["arguments"]
        now = self.progress.arguments
        for key in {**begun, **now}:
            if begun.get(key) != now.get(key):
                raise SystemExit(
                    f"{self.out}: begun with another {key}; pass the same to go on, or move "
                    "its files away to begin again, or pass another --out")
        self.progress = Progress(**state)
        print(f"{self.out}: going on after {sum(self.progress.shards.values())} shards and "
              f"{self.progress.documents:,} documents")

    def has_shards(self):
        return any(self.progress.shards.values())

    def count(self, waiting):
        return len(waiting) // self.job.item.itemsize

    def add(self, chunk, parts):
        """Take what tokenize() yields, and write the shards that are full."""
        progress = self.progress
        both = list(zip(self.waiting.values(), parts))
        full = self.shard_tokens * self.job.item.itemsize  # bytes
        is_full = any(len(waiting) + len(part) >= full for waiting, part in both)
        if is_full and not self.has_shards():
            self.save()  # a start after a kill must know whose the first shard is
        for waiting, part in both:
            waiting.extend(part)
            if self.job.has_mask:
                progress.learned += int(np.frombuffer(part, self.job.item)["learned"].sum())
        progress.documents += chunk.rows - chunk.empty
        progress.empty += chunk.empty
        progress.place = chunk.place
        progress.checksum = chunk.crc
        if is_full:
            self.hold_out()
            for split, waiting in self.waiting.items():
                while len(waiting) >= full:
                    self.write_shard(split, self.shard_tokens)
            self.save()

    def hold_out(self):
        """If a split has few tokens before the first shard, give val the end of all."""
        train, val = self.waiting.values()
        if self.has_shards() or min(self.count(train), self.count(val)) >= MANY:
            return
        # First all to train. What the hash held out comes last, and so stays held out.
        train.extend(val)
        count = self.count(train)
        window = self.job.window
        if count < 2 * window:
            raise SystemExit(
                f"{self.out}: {count} tokens leave a split empty; pass more text")
        # Then the end of them to val.
        first = round((1 - self.end_fraction) * count)
        first -= first % window
        first = min(max(first, window), count - window)
        first *= self.job.item.itemsize
        val[:] = train[first:]
        del train[first:]
        percent = 100 * self.end_fraction
        print(f"{self.out}: few documents, so val has the last {percent:g}% of the text")

    def write_shard(self, split, count):
        """Write the first `count` tokens that wait."""
        waiting = self.waiting[split]
        shards = self.progress.shards
        name = Path(self.progress.arguments["name"]).name
        file = shard_name(name, split, shards[split] + 1)
        write_files(self.out, self.contents(file, waiting, count, with_header=True))
        del waiting[:count * self.job.item.itemsize]
        shards[split] += 1

    def contents(self, file, waiting, count, with_header):
        """{file: parts}, and its mask if it has one, of the first `count` tokens that wait."""
        items = np.frombuffer(waiting, self.job.item, count)
        if self.job.window > 1:
            # A token more, since the last window's last target follows it. It is not learned.
            items = np.append(items, np.zeros(1, self.job.item))
        tokens = items["token"] if self.job.has_mask else items
        files = {file: [np.ascontiguousarray(tokens)]}
        if with_header:
            files[file].insert(0, header(self.job.dtype, len(tokens)))
        if self.job.has_mask:
            files[Path(file).with_suffix(".mask").name] = [np.ascontiguousarray(items["learned"])]
        return files

    def finish(self, files):
        """Write what still waits, and files, {name: parts}."""
        self.hold_out()
        self.save()  # after a kill among these files the next start writes them again
        progress = self.progress
        counts = {}
        for split, waiting in self.waiting.items():
            count = self.count(waiting)
            if self.has_shards():
                all_of_split = progress.shards[split] * self.shard_tokens + count
                if count:
                    self.write_shard(split, count)
                count = all_of_split
                print(f"{self.out}: {count:,} tokens in {progress.shards[split]} shards of {split}")
            else:
                # nanoGPT's files are uint16 and have no header.
                with_header = self.job.dtype != np.uint16
                files |= self.contents(f"{split}.bin", waiting, count, with_header)
                print(f"{self.out}/{split}.bin: {count:,} tokens")
            if self.job.window > 1:
                count += max(1, progress.shards[split])  # a token more in each file
            counts[split] = count
        if progress.empty:
            of = "an answer" if "chat" in progress.arguments else "text"
            print(f"{self.out}: rows or files without {of}, left out: {progress.empty:,}")
        if self.job.has_mask:
            share = progress.learned / sum(counts.values())
            print(f"{self.out}: {share:.1%} of the tokens are learned")
        record = dict(
            arguments=progress.arguments, documents=progress.documents, tokens=counts)
        files[RECORD] = [json.dumps(record).encode()]
        write_files(self.out, files)
        os.remove(self.out / STATE)


def is_prepared(out, arguments):
    """True if an earlier start with these arguments has finished, and all files are there.
    SystemExit if it has finished and one is missing."""
    record = read_record(out)
    if (out / STATE).exists() or record.get("arguments") != arguments:
        return False
    for source in filter(os.path.exists, arguments["source"]):
        if os.path.getmtime(source) > os.path.getmtime(out / RECORD):
            return False
    for split in SPLITS:
        open_masks(open_split(out, split))
    return True


def write_small(out, train, val, **meta):
    """Write out's files from two lists of tokens. SystemExit if others are there."""
    out = Path(out)
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
    """Make the directory, and remove it again if nothing was written. Inside, Ctrl-C and what
    the disk refuses are a SystemExit."""
    is_new = not out.exists()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        # Until here Ctrl-C has ended the process. Now it is the KeyboardInterrupt below.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        out.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=out).close()  # a directory that cannot be written shows at once
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
    """SystemExit if a data set is in out. Files with exactly these contents are none."""
    others = []
    for file in sorted(os.listdir(out)):
        tokens = file.replace(".mask", ".bin")
        is_data = file in (RECORD, STATE)
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
    """A parser with the help `doc` and the option that all of these commands have."""
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    parser.error = sys.exit  # one line and exit code 1, as everywhere here
    parser.add_argument("--out", metavar="DIR", help="instead of data/<name>/")
    return parser


def main(name=None, source=None, doc=__doc__, hash_fraction=0.0005, **defaults):
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
    option("--chat", action="store_true",
           help="rows are chats, messages or conversations: learn what the assistant says")
    option("--learn", metavar="A,B", help="columns of --template: learn only their text")
    option("--window", metavar="N", type=int, default=1,
           help="start each document at a multiple of N tokens, for block_size=N")
    option("--tokenizer", metavar="T", default="gpt2",
           help="gpt2 (default), bytes, or a tokenizer.json, its directory or hub name")
    option("--val_fraction", metavar="F", type=float,
           help=f"share of the documents that go into val (default: {hash_fraction}), or of the "
                "tokens if val gets the end of them (default: 0.1)")
    option("--limit", metavar="N", type=int, default=sys.maxsize,
           help="only the first N documents")
    option("--shard_tokens", metavar="N", type=int, default=100_000_000,
           help="tokens per shard (default: 100 million)")
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # Slurm or taskset may leave fewer
        cores = len(os.sched_getaffinity(0))
    option("--workers", metavar="N", type=int, default=cores,
           help=f"processes (default: one per core, here {cores})")
    parser.set_defaults(**defaults)
    args = parser.parse_intermixed_args()
    args.name = name or args.name
    args.hash_fraction = args.val_fraction or hash_fraction

    require_numbers(args)
    require_learned_columns(args)
    args.shard_tokens -= args.shard_tokens % args.window  # whole windows
    own = encoder(args.tokenizer)  # here first: a mistake is then one line, not one per worker
    if args.chat:
        extra("chat", wanted_by="--chat").chat_template(own)
    out = Path(args.out or HERE / args.name)
    with output_directory(out):
        prepare(args, own, out)


def require_numbers(args):
    """SystemExit if a number is out of its range."""
    if args.val_fraction is not None and not 0 < args.val_fraction < 1:
        raise SystemExit(f"--val_fraction={args.val_fraction} must be above 0 and below 1")
    for key in ("limit", "shard_tokens", "window", "workers"):
        if getattr(args, key) < 1:
            raise SystemExit(f"--{key}={getattr(args, key)} must be at least 1")
    if not args.window <= args.shard_tokens < 2**31:
        raise SystemExit(
            f"--shard_tokens={args.shard_tokens} must be at least --window={args.window}, and "
            "below 2**31, the limit of a file's header")


def require_learned_columns(args):
    """SystemExit if --chat or --learn does not fit the other options."""
    if args.chat and (args.template or args.learn):
        raise SystemExit("--chat: the chat template says what is text; leave out --template "
                         "and --learn")
    if not args.learn:
        return
    columns = re.findall(r"{([^{}]+)}", args.template or "")
    for column in args.learn.split(","):
        if column not in columns:
            raise SystemExit(
                f"--learn={args.learn}: the template has no {{{column}}}; pass --template with "
                f"it, such as --template='{{question}} {{{column}}}'")


def prepare(args, own, out):
    """Tokenize the documents of args, or those that an earlier start has left. own: the
    Encoder of args.tokenizer."""
    arguments = comparable(args)
    if is_prepared(out, arguments):
        print(f"{out}: prepared already with these arguments")
        return
    job = Job(
        args.tokenizer,
        np.dtype(np.uint32 if own.vocab_size > 65535 else np.uint16),
        args.hash_fraction,
        has_mask=bool(args.chat or args.learn or args.window > 1),
        window=args.window,
    )
    tokens = Tokens(out, arguments, job, end_fraction=args.val_fraction or 0.1)
    docs = up_to(documents_left(args, tokens), args.limit - tokens.progress.documents)
    from tqdm import tqdm
    with tqdm(unit=" tok", unit_scale=True, delay=1) as bar:
        for chunk, parts in tokenize(docs, args.workers, job):
            tokens.add(chunk, parts)
            bar.update(sum(map(tokens.count, parts)))

    # A tokenizer's files come along, so that the directory is whole wherever it goes.
    files = {name: [path.read_bytes()] for name, path in own.files.items()}
    meta = {"vocab_size": own.vocab_size, "tokenizer": own.name}
    if args.window > 1:
        meta["window"] = args.window
    files["meta.json"] = [json.dumps(meta).encode()]
    tokens.finish(files)


def comparable(args):
    """The arguments that make a data set what it is; a later start must have the same."""
    arguments = {**vars(args), "source": []}
    for source in args.source:
        is_local = os.path.exists(source)
        arguments["source"].append(os.path.abspath(source) if is_local else source)
    for key in ("out", "workers"):  # these may change
        del arguments[key]
    # Data sets prepared before these options existed are still recognized.
    for key, default in dict(chat=False, learn=None, window=1).items():
        if arguments[key] == default:
            del arguments[key]
    return arguments


def documents_left(args, tokens):
    """The documents after those in tokens. SystemExit if the files have changed since."""
    source, row = tokens.progress.place
    if row == 0:
        return documents(args)
    # Read the last row again, to see that it is what it was.
    docs = documents(args, (source, row - 1))
    place, document = next(docs, ((), None))
    if place != (source, row) or text_crc(document) != tokens.progress.checksum:
        raise SystemExit(
            f"{args.source[source]}: not what it was when {tokens.out} was begun; move the "
            "files there away to begin again, or pass another --out")
    return docs


if __name__ == "__main__":
    main()
