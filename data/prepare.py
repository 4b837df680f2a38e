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

What fills no shard becomes train.bin and val.bin, as nanoGPT's: uint16, or uint32 behind
llm.c's header if the vocabulary is above 65,535. More becomes shards with that header,
<name>_train_000001.bin and so on. A shard is written as soon as it is full. After a kill
start the same command again: it goes on behind the last shard.

A hash of its text puts a document into val, whatever the order, the limit or the workers.
If a split has fewer than 10,000 tokens when the first shard is full, or at the end, val is
instead the last tenth of all tokens until then.

With --chat, --learn or --window only some tokens are learned. Then beside each .bin lies a
.mask: a byte a token, 1 where it is.
"""

import glob
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
from itertools import islice
from multiprocessing import parent_process
from pathlib import Path
from tempfile import TemporaryFile

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the next imports: no traceback

import numpy as np

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parent))
from data.chat import chat_template, conversation, turns  # noqa: E402
from data.files import (  # noqa: E402
    RECORD,
    STATE,
    file_pattern,
    header,
    open_masks,
    open_split,
    read_record,
    shard_name,
)
from data.tokenizer import BESIDE, TOKENIZER, encoder  # noqa: E402

# {a file's ending: the name of what reads it in `datasets`}
KINDS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
}
HUB_NAME = r"\w[\w.-]*(/[\w.-]+)?"  # of a data set there: name, or owner/name
TEXT = (str, int, float, type(None))  # what a column of text may hold
SPLITS = ("train", "val")
# What prepare.state keeps of a Tokens.
SAVED = ("arguments", "shards", "documents", "empty", "place", "checksum", "learned")
MANY = 10_000  # tokens: a split of fewer says little
CHUNK = 1 << 20  # characters that travel to a worker together


# ---------- documents ---------------------------------------------------------


def documents(sources, text_of, column, hub, first=0, skip=0):
    """Yield (place, text) of each row of local files or hub data sets; the text may be "".
    SystemExit if one cannot be read.

    place: which source, and how many of its rows have been read. text_of: function of a row
    and its place in words. first, skip: the source to begin with, and how many of its rows to
    pass over. hub: what to load of a hub data set, as `datasets` calls it.
    """
    for number, source in enumerate(sources[first:], first):
        try:
            for row in rows(source, column, hub, skip):
                skip += 1
                yield (number, skip), text_of(row, f"{source}: row {skip}")
        except Exception as e:  # a dozen kinds: no network, no such data set, a damaged file
            reason = " ".join(str(e).split())[:300]
            remedy = "a file must be whole, and UTF-8"
            if not os.path.exists(source):
                remedy = "it is no file here; for a hub data set check its name and the network"
            raise SystemExit(f"{source}: {type(e).__name__}: {reason}; {remedy}")
        skip = 0


def rows(source, column, hub, skip):
    """Yield the rows of one file or hub data set, each {column: value}, but the first
    `skip`."""
    kind = os.path.splitext(source)[1].lower()
    is_local = os.path.isfile(source)
    if os.path.exists(source) and not is_local:
        raise SystemExit(f"{source}: not a file; name the files in it, as {source}/*.txt")
    # What is neither here nor named like a file is a hub data set.
    is_file_name = kind in (*KINDS, ".txt") or not re.fullmatch(HUB_NAME, source)
    if not is_local and is_file_name:
        raise SystemExit(f"{source}: no such file")
    if is_local and kind not in KINDS:
        if skip == 0:
            with open(source, encoding="utf-8-sig") as f:  # without a byte order mark
                text = f.read()
            yield {"text": text, column: text}  # --column is for the other files
        return
    if is_local and os.path.getsize(source) == 0:
        return  # `datasets` would fail
    import datasets
    # documents() prints what goes wrong.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if is_local:
        hub = dict(data_files=[glob.escape(source)], split="train")
        source = KINDS[kind]
        if source == "csv":
            separator = "\t" if kind == ".tsv" else ","
            # Unless told, pandas takes more for null than an empty field: "NA", "None", ...
            hub |= dict(sep=separator, keep_default_na=False, na_values=[""])
    yield from datasets.load_dataset(source, **hub, streaming=True).skip(skip)


def fill(template, row, where, learn=None):
    """The template with the row's value for each {column}; null is empty. With `learn`,
    names of columns, it is JSON: the text, and the spans of their values."""
    text = ""
    spans = []
    for i, part in enumerate(re.split(r"{([^{}]+)}", template)):
        start = len(text)
        text += value(row, part, where) if i % 2 else part
        if i % 2 and learn and part in learn:
            spans.append((start, len(text)))
    if learn and text:
        return json.dumps((text, spans), ensure_ascii=False)
    return text


def value(row, column, where):
    """A row's text in a column. SystemExit if the column is not there, or holds no text."""
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
    """Yield rows as documents() does, until `count` of them have text."""
    if count < 1:
        return
    for place, text in docs:
        yield place, text
        count -= bool(text)
        if count == 0:
            return


# ---------- tokens ------------------------------------------------------------


def chunks(docs):
    """Yield (texts, place of the last): short documents together, long ones alone."""
    texts = []
    size = 0
    for place, text in docs:
        texts.append(text)
        size += len(text)
        if size >= CHUNK:
            yield texts, place
            texts = []
            size = 0
    if texts:
        yield texts, place


def encode(texts, tokenizer, item, val_fraction, kind="", window=1):
    """The tokens of train and those of val, as bytes; runs in a worker. item: the type of
    one, as in Tokens. kind: of a text, "chat" or "learn", or plain."""
    own = encoder(tokenizer)
    parts = bytearray(), bytearray()
    for text in filter(None, texts):
        digest = hashlib.sha256(text.encode()).digest()
        held_out = int.from_bytes(digest[:8], "little") < val_fraction * 2**64
        if item.names:
            for tokens in masked(text, own, item, kind, window):
                parts[held_out].extend(tokens.tobytes())
            continue
        tokens = np.array(own.encode(text), item)
        if tokens[-1:].tolist() != [own.end]:  # some tokenizers put it there themselves
            tokens = np.append(tokens, item.type(own.end))
        parts[held_out].extend(tokens.tobytes())
    return parts


def masked(text, own, item, kind, window):
    """Yield the tokens of a document, or of each that a chat becomes, with their masks. They
    are those of the whole text, as without a mask: some tokenizers write a part of it
    otherwise when it stands alone."""
    documents = [(text, [(0, len(text))])]
    options = {}
    if kind == "chat":
        documents = turns(text, chat_template(own.file))
        options = dict(add_special_tokens=False)  # the template writes them
    elif kind == "learn":
        documents = [json.loads(text)]
    for text, spans in documents:
        ids, places = own.spans(text, **options)
        ids = list(ids)
        learned = overlaps(places, spans, len(text))
        if kind != "chat":
            if ids[-1:] != [own.end]:
                ids.append(own.end)
                learned.append(0)
            learned[-1] = spans[-1][1] == len(text)
        padding = -len(ids) % window
        tokens = np.empty(len(ids) + padding, item)
        tokens["token"] = ids + padding * [own.end]
        tokens["learned"] = learned + padding * [0]
        if window > 1:
            tokens["learned"][0] = 0  # the window before has it as its last target
        yield tokens


def overlaps(places, spans, length):
    """[has the token at this place a character in one of the spans?]"""
    before = np.zeros(length + 1, int)  # i: how many of the first i characters are in them
    for start, end in spans:
        before[start + 1:end + 1] = 1
    before = before.cumsum()
    starts, ends = np.array(places, int).reshape(-1, 2).T
    # A token of spaces alone may have none of them in its place, only its end is right.
    starts = np.minimum(starts, ends - 1).clip(0)
    return (before[ends] > before[starts]).tolist()


def tokenize(docs, workers, *how):
    """Yield (number of rows, and of those without text, place and checksum of the last, their
    tokens) for each chunk of docs, in order. how: encode's other arguments."""
    with ProcessPoolExecutor(workers, initializer=end_as_prepare_ends) as pool:
        def submit(texts, place):
            tokens = pool.submit(encode, texts, *how)
            return len(texts), texts.count(""), place, checksum(texts[-1]), tokens

        # A generator: a chunk is read and sent to a worker when it is asked for.
        submitted = (submit(texts, place) for texts, place in chunks(docs))
        pending = list(islice(submitted, 4 * workers))  # no more wait, so memory stays flat
        while pending:
            *mark, tokens = pending.pop(0)
            yield *mark, tokens.result()
            pending += islice(submitted, 1)


def end_as_prepare_ends():
    """In a worker: leave Ctrl-C to prepare.py. When that is killed end too, for no chunk
    will come any more."""
    def wait():
        parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=wait, daemon=True).start()


def checksum(text):
    return zlib.crc32(text.encode())


# ---------- files -------------------------------------------------------------


class Tokens:
    """The tokens of train and val, on their way to the files in `out`.

    They wait in memory until they fill a shard. When one has been written, prepare.state
    gets those that still wait, and how far the documents have been read. The next start
    goes on from there. After a kill between the two it writes the same shard once more.

    Each token waits as one `item`: itself, or with a mask the two fields token and learned.
    """

    def __init__(self, out, arguments, item, end_fraction):
        """arguments: a later start must have the same. SystemExit if it has not, or if out
        has another data set."""
        self.out = out
        self.arguments = arguments
        self.item = item
        self.end_fraction = end_fraction
        self.window = arguments.get("window", 1)  # each document begins at a multiple of it
        self.shard_bytes = arguments["shard_tokens"] * item.itemsize
        self.waiting = {split: bytearray() for split in SPLITS}
        self.shards = dict.fromkeys(SPLITS, 0)  # how many have been written
        self.documents = 0  # how many have been read
        self.empty = 0  # how many rows between them have no text
        self.place = (0, 0)  # of the last row, as documents() yields it
        self.checksum = 0  # of its text
        self.learned = 0  # how many tokens are, with a mask
        if (out / STATE).exists():
            self.load()
        else:
            refuse_to_replace(out, {})

    def save(self):
        state = {key: getattr(self, key) for key in SAVED}
        state["waiting"] = [len(tokens) for tokens in self.waiting.values()]
        line = json.dumps(state) + "\n"
        write_files(self.out, {STATE: [line.encode(), *self.waiting.values()]})

    def load(self):
        with open(self.out / STATE, "rb") as f:
            state = json.loads(f.readline())
            for tokens, size in zip(self.waiting.values(), state.pop("waiting")):
                tokens.extend(f.read(size))
        begun = state["arguments"]
        for key in {**begun, **self.arguments}:
            if begun.get(key) != self.arguments.get(key):
                raise SystemExit(
                    f"{self.out}: begun with another {key}; pass the same to go on, or move "
                    "its files away to begin again, or pass another --out")
        vars(self).update(state)
        shards = sum(self.shards.values())
        print(f"{self.out}: going on behind {shards} shards and {self.documents:,} documents")

    def add(self, rows, empty, place, checksum, parts):
        """Take what tokenize() yields, and write the shards that are full."""
        both = list(zip(self.waiting.values(), parts))
        full = any(len(tokens) + len(more) >= self.shard_bytes for tokens, more in both)
        if full and not any(self.shards.values()):
            self.save()  # a start after a kill must know whose the first shard is
        for tokens, more in both:
            tokens.extend(more)
        self.documents += rows - empty
        self.empty += empty
        self.place = place
        self.checksum = checksum
        if self.item.names:
            for more in parts:
                self.learned += int(np.frombuffer(more, self.item)["learned"].sum())
        if not full:
            return
        self.hold_out()
        for split, tokens in self.waiting.items():
            while len(tokens) >= self.shard_bytes:
                self.write_shard(split, self.shard_bytes)
        self.save()

    def hold_out(self):
        """If a split has few tokens before the first shard, give val the end of all."""
        train, val = self.waiting.values()
        width = self.item.itemsize
        if any(self.shards.values()) or min(len(train), len(val)) >= MANY * width:
            return
        # First all to train. What the hash held out comes last, and so stays held out.
        train.extend(val)
        count = len(train) // width
        if count < 2 * self.window:
            raise SystemExit(
                f"{self.out}: {count} tokens leave a split empty; pass more text")
        # Then the end of them to val.
        first = round((1 - self.end_fraction) * count)
        first -= first % self.window
        first = min(max(first, self.window), count - self.window)
        val[:] = train[first * width:]
        del train[first * width:]
        percent = 100 * self.end_fraction
        print(f"{self.out}: few documents, so val has the last {percent:g}% of the text")

    def write_shard(self, split, size):
        """Write the first `size` bytes of those that wait."""
        tokens = self.waiting[split]
        name = Path(self.arguments["name"]).name
        file = shard_name(name, split, self.shards[split] + 1)
        with memoryview(tokens) as view, view[:size] as first:
            write_files(self.out, self.contents(file, first, with_header=True))
        del tokens[:size]
        self.shards[split] += 1

    def contents(self, file, waiting, with_header):
        """{name: parts} of a file and of its mask, if it has one."""
        dtype = self.item
        count = len(waiting) // self.item.itemsize
        files = {file: [waiting]}
        if self.item.names:
            items = np.frombuffer(waiting, self.item)
            if self.window > 1:
                items = np.append(items, np.zeros(1, self.item))  # the last window's last target
            dtype = self.item["token"]
            count = len(items)
            mask = Path(file).with_suffix(".mask").name
            files = {file: [items["token"].tobytes()], mask: [items["learned"].tobytes()]}
        if with_header:
            files[file].insert(0, header(dtype, count))
        return files

    def finish(self, files):
        """Write what still waits, and files, {name: parts}."""
        self.hold_out()
        self.save()  # after a kill among these files the next start writes them again
        in_shards = any(self.shards.values())
        counts = {}
        for split, tokens in self.waiting.items():
            count = len(tokens) // self.item.itemsize
            if in_shards:
                count += self.shards[split] * self.arguments["shard_tokens"]
                if tokens:
                    self.write_shard(split, len(tokens))
                print(f"{self.out}: {count:,} tokens in {self.shards[split]} shards of {split}")
            else:
                # nanoGPT's files are uint16 and have no header.
                with_header = self.item not in (np.uint16, item_with_mask(np.uint16))
                files |= self.contents(f"{split}.bin", tokens, with_header)
                print(f"{self.out}/{split}.bin: {count:,} tokens")
            if self.window > 1:
                count += max(1, self.shards[split])  # see contents()
            counts[split] = count
        if self.empty:
            of = "an answer" if "chat" in self.arguments else "text"
            print(f"{self.out}: rows or files without {of}, left out: {self.empty:,}")
        if self.item.names:
            share = self.learned / sum(counts.values())
            print(f"{self.out}: {share:.1%} of the tokens are learned")
        record = dict(arguments=self.arguments, documents=self.documents, tokens=counts)
        files[RECORD] = [json.dumps(record).encode()]
        write_files(self.out, files)
        os.remove(self.out / STATE)


def item_with_mask(dtype):
    return np.dtype([("token", dtype), ("learned", np.uint8)])


def is_prepared(out, arguments):
    """Has an earlier start with these arguments ended, and is it all there? SystemExit if
    it has ended, and something is missing."""
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
    with writing(out):
        refuse_to_replace(out, contents)
        write_files(out, {file: [content] for file, content in contents.items()})
    print(f"{out}/train.bin: {len(train):,} tokens")
    print(f"{out}/val.bin: {len(val):,} tokens")


def write_files(out, files):
    """Write {name: parts}. Each file is whole or not there, whenever this is killed."""
    try:
        for name, parts in files.items():
            with open(out / f"{name}.tmp", "wb") as f:
                f.writelines(parts)
                f.flush()
                os.fsync(f.fileno())
        for name in files:
            os.replace(out / f"{name}.tmp", out / name)
        directory = os.open(out, os.O_RDONLY)
        os.fsync(directory)  # the renames themselves
        os.close(directory)
    finally:
        for name in files:
            (out / f"{name}.tmp").unlink(missing_ok=True)


@contextmanager
def writing(out):
    """A directory to write in. If nothing was written it is removed again."""
    is_new = not out.exists()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        # Until here Ctrl-C has ended the process. Now it is the KeyboardInterrupt below.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        out.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=out).close()  # if it cannot be written, that is known at once
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


def refuse_to_replace(out, contents):
    """SystemExit if a data set is in out, but for files with just these contents."""
    others = []
    for file in sorted(os.listdir(out)):
        if file in contents:
            if contents[file] != (out / file).read_bytes():
                others.append(file)
        elif file in (RECORD, STATE) or any(
                file_pattern(split).fullmatch(file.replace(".mask", ".bin")) for split in SPLITS):
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
           help=f"of the documents (default: {hash_fraction}), or of the tokens where it is "
                "the end of them (default: 0.1)")
    option("--limit", metavar="N", type=int, default=sys.maxsize,
           help="only the first N documents")
    option("--shard_tokens", metavar="N", type=int, default=100_000_000,
           help="(default: 100 million)")
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # Slurm or taskset may leave fewer
        cores = len(os.sched_getaffinity(0))
    option("--workers", metavar="N", type=int, default=cores,
           help=f"processes (default: one a core, here {cores})")
    parser.set_defaults(**defaults)
    args = parser.parse_intermixed_args()
    args.name = name or args.name
    args.hash_fraction = hash_fraction

    end_fraction = 0.1
    if args.val_fraction is not None:
        args.hash_fraction = end_fraction = args.val_fraction
    if not 0 < args.hash_fraction < 1:
        raise SystemExit(f"--val_fraction={args.val_fraction} must be above 0 and below 1")
    for key in ("limit", "shard_tokens", "window", "workers"):
        if getattr(args, key) < 1:
            raise SystemExit(f"--{key}={getattr(args, key)} must be at least 1")
    if not args.window <= args.shard_tokens < 2**31:
        raise SystemExit(
            f"--shard_tokens={args.shard_tokens} must be at least --window={args.window}, and "
            "below 2**31, which is what a file's header can say")
    args.shard_tokens -= args.shard_tokens % args.window  # whole windows
    check_learned(args)
    own = encoder(args.tokenizer)  # here first: a mistake is then one line, not one a worker
    if args.chat:
        chat_template(own.file)
    out = Path(args.out or HERE / args.name)
    with writing(out):
        prepare(args, end_fraction, own, out)


def check_learned(args):
    """SystemExit if --chat or --learn do not fit the other options."""
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


def prepare(args, end_fraction, own, out):
    """Tokenize the documents of args, or those that an earlier start has left."""
    arguments = {**vars(args), "source": []}
    for source in args.source:
        is_local = os.path.exists(source)
        arguments["source"].append(os.path.abspath(source) if is_local else source)
    for key in ("out", "workers"):  # these may change
        del arguments[key]
    kind = "chat" if args.chat else "learn" if args.learn else ""
    for key, default in dict(chat=False, learn=None, window=1).items():
        if arguments[key] == default:  # so a data set without them is as it always was
            del arguments[key]
    item = np.dtype(np.uint32 if own.vocab_size > 65535 else np.uint16)
    if kind or args.window > 1:
        item = item_with_mask(item)
    if is_prepared(out, arguments):
        print(f"{out}: prepared already with these arguments")
        return
    tokens = Tokens(out, arguments, item, end_fraction)

    docs = up_to(documents_left(args, tokens), args.limit - tokens.documents)
    how = (args.tokenizer, item, args.hash_fraction, kind, args.window)
    chunks = tokenize(docs, args.workers, *how)
    from tqdm import tqdm
    with tqdm(unit=" tok", unit_scale=True, delay=1) as bar:
        for *mark, parts in chunks:
            tokens.add(*mark, parts)
            bar.update(sum(map(len, parts)) // item.itemsize)

    files = {}
    tokenizer = args.tokenizer
    if own.file:  # copies, so that the directory is whole wherever it goes
        tokenizer = TOKENIZER
        files[TOKENIZER] = [Path(own.file).read_bytes()]
        for path in map(Path(own.file).with_name, BESIDE):
            if path.exists():
                files[path.name] = [path.read_bytes()]
    meta = {"vocab_size": own.vocab_size, "tokenizer": tokenizer}
    if args.window > 1:
        meta["window"] = args.window
    files["meta.json"] = [json.dumps(meta).encode()]
    tokens.finish(files)


def documents_left(args, tokens):
    """The documents behind those in tokens. SystemExit if they are of other files now."""
    template = (args.template or "{" + args.column + "}").replace(r"\n", "\n")
    learn = args.learn and args.learn.split(",")

    def text_of(row, where):
        if args.chat:
            return conversation(row, args.column, where)
        return fill(template, row, where, learn)

    hub = dict(name=args.subset, split=args.split)
    what = (args.source, text_of, args.column, hub)
    source, row = tokens.place
    if row == 0:
        return documents(*what)
    # Read the last row again, to see that it is what it was.
    docs = documents(*what, source, row - 1)
    place, text = next(docs, ((), ""))
    if [*place, checksum(text)] != [source, row, tokens.checksum]:
        raise SystemExit(
            f"{args.source[source]}: not what it was when {tokens.out} was begun; move the "
            "files there away to begin again, or pass another --out")
    return docs


if __name__ == "__main__":
    main()
