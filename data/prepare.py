r"""
Turn any text into train.bin and val.bin: local files, or a data set of the Hugging Face hub.

    python data/prepare.py my_data notes/*.txt                            # -> data/my_data/
    python data/prepare.py my_data chats.jsonl --template='Q: {question}\nA: {answer}'
    python data/prepare.py my_data table.parquet --column=body --tokenizer=bytes
    python data/prepare.py my_data chats.jsonl --tokenizer=HuggingFaceTB/SmolLM2-135M
    python data/prepare.py fineweb HuggingFaceFW/fineweb-edu --subset=sample-10BT --limit=10000

A .txt file is one document; in .jsonl, .json, .parquet and .csv files each row is one. Documents
are streamed through all cores, so memory stays flat, and each ends with an end-of-text token.
Vocabularies above 65,535 make files of uint32 with llm.c's header, others of uint16 without one.

A hash of its text decides whether a document goes to val.bin: it always lands in the same split,
whatever the order, the limit or the number of workers. If that leaves a split with fewer than
10,000 tokens, the text is cut in two instead, and val.bin is the last tenth of its tokens.
"""

import argparse
import glob
import hashlib
import json
import os
import re
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import islice

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
from data.loader import HEADER_BYTES, UINT32  # noqa: E402
from data.tokenizer import TOKENIZER, encoder, tokenizer_file  # noqa: E402

KINDS = {".txt": None, ".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
CHUNK = 1 << 20  # characters that travel to a worker at a time
FEW = 10_000  # tokens: the loss on fewer says little


def documents(sources, subset, split, template):
    """Yield the documents of local files or hub data sets; SystemExit (one line) if one is bad."""
    for source in sources:
        for path in sorted(glob.glob(source)) or [source]:
            try:
                for row in rows(path, subset, split):
                    text = fill(template, row, path)
                    if text:
                        yield text
            except UnicodeDecodeError as e:
                raise SystemExit(f"{path}: not UTF-8 ({e.reason}); try iconv -f latin1 -t utf-8")
            except Exception as e:  # a dozen kinds: no network, no such data set, a damaged file
                remedy = "check the name and the network, or pass downloaded files"
                if os.path.exists(path):
                    remedy = "check its contents"
                reason = " ".join(str(e).split())[:300]
                raise SystemExit(f"{path}: {type(e).__name__}: {reason}; {remedy}")


def rows(source, subset, split):
    """The rows of one file or hub data set, {column: value} each, streamed unless .txt."""
    kind = os.path.splitext(source)[1].lower()
    if kind in KINDS and not os.path.exists(source):
        raise SystemExit(f"{source}: no such file")
    if kind not in KINDS and os.path.exists(source):
        raise SystemExit(f"{source}: not a file of kind {', '.join(KINDS)}")
    if kind in KINDS and os.path.getsize(source) == 0:
        return []
    if kind == ".txt":
        with open(source, encoding="utf-8") as f:
            return [{"text": f.read()}]
    import datasets
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # documents() prints the error
    files = None
    if kind in KINDS:
        source, files, subset, split = KINDS[kind], [glob.escape(source)], None, "train"
    return datasets.load_dataset(source, subset, data_files=files, split=split, streaming=True)


def fill(template, row, where):
    """template with each {column} replaced by its value in row."""
    def value(match):
        name = match[1]
        if name not in row:
            raise SystemExit(f"{where}: no column {name}; it has {', '.join(row)}; "
                             "pass --column or --template")
        if not isinstance(row[name], (str, int, float, type(None))):
            raise SystemExit(f"{where}: column {name} holds a {type(row[name]).__name__}, not "
                             "text; pass another --column or a --template")
        return "" if row[name] is None else str(row[name])
    return re.sub(r"{([^{}]+)}", value, template)


def chunks(docs):
    """Lists of documents, about CHUNK characters together."""
    chunk, size = [], 0
    for text in docs:
        chunk.append(text)
        size += len(text)
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    yield chunk


def encode(chunk, tokenizer, val_fraction):
    """(tokens of train, tokens of val); runs in a worker."""
    document, vocab_size = encoder(tokenizer)
    dtype = np.uint16 if vocab_size <= 65535 else np.uint32
    parts = ([np.zeros(0, dtype)], [np.zeros(0, dtype)])
    for text in chunk:
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        parts[digest < val_fraction * 2**64].append(np.array(document(text), dtype))
    return [np.concatenate(part) for part in parts]


def tokenized(docs, tokenizer, val_fraction, workers):
    """Yield encode(chunk), in the order of docs: the files do not depend on the workers."""
    with ProcessPoolExecutor(workers) as pool:
        pending = []
        for chunk in chunks(docs):
            pending.append(pool.submit(encode, chunk, tokenizer, val_fraction))
            if len(pending) == 4 * workers:  # bounded: memory stays flat
                yield pending.pop(0).result()
        for future in pending:
            yield future.result()


def hold_out_end(train, val, fraction, offset, width):
    """Move tokens (of width bytes, behind offset) between the two files until val has the last
    `fraction` of them."""
    val.seek(offset)
    shutil.copyfileobj(val, train)  # what the hash held out comes last, and so stays held out
    start = offset + width * round((1 - fraction) * (train.tell() - offset) / width)
    train.seek(start)
    val.seek(offset)
    val.truncate()
    shutil.copyfileobj(train, val)
    train.truncate(start)


def write(docs, out, tokenizer, val_fraction, end_fraction, workers):
    """Tokenize docs into train.bin, val.bin and meta.json in out; SystemExit if one stays empty.

    val_fraction is of the documents; end_fraction, of the tokens, where those are few.
    """
    from tqdm import tqdm
    _, vocab_size = encoder(tokenizer)  # here first: what is wrong is one line, not one a worker
    offset, width = (0, 2) if vocab_size <= 65535 else (HEADER_BYTES, 4)
    paths = [os.path.join(out, name) for name in ("train.bin", "val.bin", "meta.json")]
    files = []
    try:
        os.makedirs(out, exist_ok=True)
        train, val, meta = files = [open(path + ".tmp", "w+b") for path in paths]
        for file in (train, val):
            file.write(bytes(offset))
        with tqdm(unit=" tokens", unit_scale=True, delay=1) as bar:
            for parts in tokenized(docs, tokenizer, val_fraction, workers):
                for file, tokens in zip((train, val), parts):
                    file.write(tokens)
                    bar.update(len(tokens))
        how = ""
        if min(train.tell(), val.tell()) < offset + width * FEW:
            hold_out_end(train, val, end_fraction, offset, width)
            how = f", the last {100 * end_fraction:g}% of the text"
        counts = [(file.seek(0, os.SEEK_END) - offset) // width for file in (train, val)]
        if 0 in counts:
            raise SystemExit(f"{out}: {sum(counts)} tokens leave a split empty; pass more text")
        if offset:  # llm.c's header: magic, version, number of tokens, in int32
            if max(counts) >= 2**31:
                raise SystemExit(f"{out}: {max(counts):,} tokens are more than a file of uint32 "
                                 "can name; pass a --limit")
            for file, count in zip((train, val), counts):
                file.seek(0)
                file.write(np.array([UINT32, 7, count], np.int32))
        kind = tokenizer if tokenizer in ("gpt2", "bytes") else TOKENIZER
        meta.write(json.dumps({"vocab_size": vocab_size, "tokenizer": kind}).encode())
        if kind == TOKENIZER:  # a copy, so that the directory is whole wherever it goes
            shutil.copyfile(tokenizer_file(tokenizer), os.path.join(out, TOKENIZER))
        for file, path in zip(files, paths):
            file.close()
            os.replace(path + ".tmp", path)
    except OSError as e:
        raise SystemExit(f"cannot write {out}: {e.strerror}; make room, or pass another --out")
    finally:
        for file, path in zip(files, paths):
            file.raw.close()  # without writing what a full disk did not take
            if os.path.exists(path + ".tmp"):
                os.remove(path + ".tmp")
    print(f"{paths[0]}: {counts[0]:,} tokens\n{paths[1]}: {counts[1]:,} tokens{how}")


def main(name=None, source=None, doc=__doc__, val_fraction=0.0005, **defaults):
    """The command line; each data/<name>/prepare.py calls it with its name, source and defaults."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=raw)
    parser.error = sys.exit  # one line and exit code 1, as everywhere here
    option = parser.add_argument
    if name is None:
        option("name", help="files go to data/<name>/")
        option("source", nargs="+", help=f"local files ({', '.join(KINDS)}), or a hub data set")
    else:
        option("--source", nargs="+", metavar="FILE", default=[source],
               help=f"local files, instead of {source} from the hub")
    option("--subset", help="configuration of a hub data set")
    option("--split", default="train", help="split of a hub data set (default: train)")
    option("--column", default="text", help="column that holds the text (default: text)")
    option("--template", help=r"text made of several columns, e.g. 'Q: {question}\nA: {answer}'")
    option("--tokenizer", default="gpt2", metavar="T",
           help="gpt2 (default), bytes, or a tokenizer.json, its directory or its hub name")
    option("--val_fraction", type=float, metavar="F",
           help=f"fraction for validation (default: {val_fraction} of the documents, or 0.1 of the "
                "tokens where the text is cut in two)")
    option("--limit", type=int, metavar="N", default=sys.maxsize, help="only the first N documents")
    option("--workers", type=int, metavar="N", default=os.cpu_count(),
           help="processes (default: one a core)")
    option("--out", metavar="DIR", help="directory for the files, instead of data/<name>/")
    parser.set_defaults(**defaults)
    args = parser.parse_args()
    end_fraction = 0.1
    if args.val_fraction is not None:
        val_fraction = end_fraction = args.val_fraction
    if not 0 < val_fraction < 1 or min(args.workers, args.limit) < 1:
        raise SystemExit("--val_fraction must be between 0 and 1, --workers and --limit at least 1")
    template = (args.template or f"{{{args.column}}}").replace(r"\n", "\n")
    docs = islice(documents(args.source, args.subset, args.split, template), args.limit)
    out = args.out or os.path.join(HERE, name or args.name)
    write(docs, out, args.tokenizer, val_fraction, end_fraction, args.workers)


if __name__ == "__main__":
    main()
