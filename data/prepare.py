r"""
Turn any text into train.bin and val.bin: local files, or a data set of the Hugging Face hub.

    python data/prepare.py my_data notes/*.txt                            # -> data/my_data/
    python data/prepare.py my_data chats.jsonl --template='Q: {question}\nA: {answer}'
    python data/prepare.py my_data a.parquet --column=body --tokenizer=HuggingFaceTB/SmolLM2-135M
    python data/prepare.py fineweb HuggingFaceFW/fineweb-edu --subset=sample-10BT --limit=10000

A .txt file is one document; in .jsonl, .json, .parquet and .csv files each row is one. Documents
are streamed through all cores, so memory stays flat, and each ends with an end-of-text token.
Vocabularies above 65,535 make files of uint32 with llm.c's header, others of uint16 without one.

A hash of its text puts a document into val.bin, whatever the order, the limit or the workers. If
that leaves a split with fewer than 10,000 tokens, val.bin is the last tenth of all tokens instead.
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
from functools import partial
from itertools import islice

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from data.loader import HEADER_BYTES, HERE, UINT32  # noqa: E402
from data.tokenizer import TOKENIZER, encoder  # noqa: E402

KINDS = {".txt": None, ".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def documents(sources, template, **hub):
    """Yield the documents of local files or hub data sets; SystemExit (one line) if one is bad."""
    for source in sources:
        try:
            for row in rows(source, hub):
                yield re.sub(r"{([^{}]+)}", partial(cell, row, source), template)
        except Exception as e:  # a dozen kinds: no network, no such data set, a damaged file
            reason = " ".join(str(e).split())[:300]
            raise SystemExit(f"{source}: {type(e).__name__}: {reason}; a file must be whole, and "
                             "UTF-8; for a hub data set check the name and the network")


def rows(source, hub):
    """The rows of one file or hub data set, {column: value} each, streamed unless .txt."""
    kind = os.path.splitext(source)[1].lower()
    local = os.path.exists(source)
    if local != (kind in KINDS):  # what is neither here nor named like a file is a hub data set
        raise SystemExit(f"{source}: no such file, or not a file of kind {', '.join(KINDS)}")
    if local and os.path.getsize(source) == 0:
        return []
    if kind == ".txt":
        with open(source, encoding="utf-8") as f:
            return [{"text": f.read()}]
    import datasets
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # documents() prints the error
    if local:
        source, hub = KINDS[kind], dict(data_files=[glob.escape(source)], split="train")
    return datasets.load_dataset(source, **hub, streaming=True)


def cell(row, where, match):
    """The text in the column that match[1] names; empty for null."""
    value = row.get(match[1], [])
    if not isinstance(value, (str, int, float, type(None))):
        raise SystemExit(f"{where}: no text in column {match[1]}; pass --column or --template for "
                         f"one of {', '.join(row)}")
    return "" if value is None else str(value)


def chunks(docs):
    """Lists of about a million characters: short documents travel together, long ones alone."""
    chunk, size = [], 0
    for text in docs:
        chunk.append(text)
        size += len(text)
        if size >= 1 << 20:
            yield chunk
            chunk, size = [], 0
    yield chunk


def encode(chunk, dtype, tokenizer, val_fraction):
    """The tokens of train and those of val, as bytes; runs in a worker."""
    ids, end, _, _ = encoder(tokenizer)
    parts = bytearray(), bytearray()
    for text in chunk:
        tokens = np.array(ids(text), dtype)
        if tokens[-1:].tolist() != [end]:  # some tokenizers put it there themselves
            tokens = np.append(tokens, dtype.type(end))
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        parts[digest < val_fraction * 2**64].extend(tokens.tobytes())
    return parts


def tokenize(docs, files, workers, dtype, *options):
    """Append the tokens of docs to train's and val's files, in order, whatever the workers."""
    from tqdm import tqdm
    with ProcessPoolExecutor(workers) as pool, tqdm(unit=" tok", unit_scale=True, delay=1) as bar:
        futures = (pool.submit(encode, chunk, dtype, *options) for chunk in chunks(docs))
        pending = list(islice(futures, 4 * workers))  # bounded: memory stays flat
        while pending:
            for file, tokens in zip(files, pending.pop(0).result()):
                bar.update(file.write(tokens) // dtype.itemsize)
            pending += islice(futures, 1)


def hold_out_end(train, val, fraction, offset, width):
    """Move tokens (width bytes each, after offset) until val has the last `fraction` of them."""
    val.seek(offset)
    shutil.copyfileobj(val, train)  # what the hash held out comes last, and so stays held out
    start = offset + width * round((1 - fraction) * (train.tell() - offset) / width)
    train.seek(start)
    val.truncate(val.seek(offset))
    shutil.copyfileobj(train, val)
    train.truncate(start)


def write(docs, out, tokenizer, fractions, workers):
    """Write out's files. fractions for val.bin: of the documents; of the tokens, if cut in two."""
    *_, vocab_size, own = encoder(tokenizer)  # here first: a mistake is one line, not one a worker
    offset, width = (0, 2) if vocab_size <= 65535 else (HEADER_BYTES, 4)
    tmp, how = os.path.join(out, "prepare.tmp"), ""
    shutil.rmtree(tmp, ignore_errors=True)  # a killed run's
    try:
        os.makedirs(tmp)
        with open(f"{tmp}/train.bin", "w+b") as train, open(f"{tmp}/val.bin", "w+b") as val:
            train.write(bytes(offset))
            val.write(bytes(offset))
            tokenize(docs, (train, val), workers, np.dtype(f"u{width}"), tokenizer, fractions[0])
            if min(train.tell(), val.tell()) < offset + width * 10_000:  # too few to say much
                hold_out_end(train, val, fractions[1], offset, width)
                how = f", the last {100 * fractions[1]:g}% of the text"
            counts = [(file.seek(0, os.SEEK_END) - offset) // width for file in (train, val)]
            if 0 in counts:
                raise SystemExit(f"{out}: {sum(counts)} tokens leave a split empty; pass more text")
            if offset and max(counts) >= 2**31:
                raise SystemExit(f"{out}: {max(counts):,} tokens are 2**31 or more; pass a --limit")
            for file, count in zip((train, val), counts):
                if offset:  # llm.c's header: magic, version, number of tokens
                    file.seek(0)
                    file.write(np.array([UINT32, 7, count], np.int32))
        with open(f"{tmp}/meta.json", "w") as f:
            json.dump({"vocab_size": vocab_size, "tokenizer": TOKENIZER if own else tokenizer}, f)
        if own:  # a copy, so that the directory is whole wherever it goes
            shutil.copyfile(own, f"{tmp}/{TOKENIZER}")
        for name in os.listdir(tmp):
            os.replace(f"{tmp}/{name}", f"{out}/{name}")
    except OSError as e:
        raise SystemExit(f"cannot write {out}: {e.strerror}; make room, or pass another --out")
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    print(f"{out}/train.bin: {counts[0]:,} tokens\n{out}/val.bin: {counts[1]:,} tokens{how}")


def main(name=None, source=None, doc=__doc__, val_fraction=0.0005, **defaults):
    """The command line; each data/<name>/prepare.py calls it with its name, source and defaults."""
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    parser.error = sys.exit  # one line and exit code 1, as everywhere here
    option = parser.add_argument
    if name is None:
        option("name", help="files go to data/<name>/")
    option("source", nargs="*" if source else "+", default=[source], help="files, or hub data sets")
    option("--subset", help="configuration of a hub data set")
    option("--split", default="train", help="split of a hub data set (default: train)")
    option("--column", default="text", help="column that holds the text (default: text)")
    option("--template", help=r"text made of several columns, e.g. 'Q: {question}\nA: {answer}'")
    option("--tokenizer", default="gpt2", metavar="T",
           help="gpt2 (default), bytes, or a tokenizer.json, its directory or its hub name")
    option("--val_fraction", type=float, help=f"default: {val_fraction} of the documents")
    option("--limit", type=int, metavar="N", default=sys.maxsize, help="only the first N documents")
    option("--workers", type=int, metavar="N", default=os.cpu_count(), help="default: one a core")
    option("--out", metavar="DIR", help="directory for the files, instead of data/<name>/")
    parser.set_defaults(**defaults)
    args = parser.parse_args()
    fractions = [val_fraction, 0.1] if args.val_fraction is None else [args.val_fraction] * 2
    if not 0 < fractions[0] < 1 or min(args.workers, args.limit) < 1:
        raise SystemExit("--val_fraction must be between 0 and 1, --workers and --limit at least 1")
    template = (args.template or f"{{{args.column}}}").replace(r"\n", "\n")
    docs = documents(args.source, template, name=args.subset, split=args.split)
    docs = islice(filter(None, docs), args.limit)
    out = args.out or os.path.join(HERE, name or args.name)
    write(docs, out, args.tokenizer, fractions, args.workers)


if __name__ == "__main__":
    main()
