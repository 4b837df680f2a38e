"""
Turn any text into train.bin and val.bin: a data set of the Hugging Face hub, or local text, JSONL, Parquet or CSV files.

    python data/prepare.py my_data notes/*.txt                              # -> data/my_data/
    python data/prepare.py my_data chats.jsonl --template='Q: {question}\nA: {answer}'
    python data/prepare.py my_data table.parquet --column=body --tokenizer=bytes
    python data/prepare.py fineweb HuggingFaceFW/fineweb-edu --subset=sample-10BT --limit=10000

Documents are streamed, tokenized by all cores, and written as they come, so memory stays flat; each ends with an
end-of-text token. A document goes to the validation split by a hash of its text: the same document always lands in the
same split, whatever the order, the limit or the number of workers. Files get their final names only when all is written.
"""

import argparse
import glob
import hashlib
import json
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import islice

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from data.loader import gpt2_bpe  # noqa: E402

LOADERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
CHUNK = 1 << 20  # characters that travel to a worker at a time


# -----------------------------------------------------------------------------
# documents


def documents(source, subset=None, split="train", column="text", template=None):
    """Yield the documents of a hub data set (a name) or of local files (a list of paths), one string each. SystemExit with one line."""
    import datasets
    datasets.disable_progress_bars()
    local = [p for pattern in source for p in sorted(glob.glob(pattern))]
    try:
        if local:
            kinds = {os.path.splitext(p)[1].lower() for p in local}
            if not kinds <= set(LOADERS):
                raise SystemExit(f"{sorted(kinds - set(LOADERS))[0]} files are not known; use {', '.join(LOADERS)}")
            if all(os.path.getsize(p) == 0 for p in local):
                raise SystemExit(f"{local[0]}: empty; there is nothing to tokenize")
            for kind in sorted(kinds):
                paths = [p for p in local if p.lower().endswith(kind)]
                for path in paths if kind in (".txt", ".jsonl", ".json", ".csv") else ():
                    check_utf8(path)
                # a text file is one document, not one a line
                extra = {"sample_by": "document"} if kind == ".txt" else {}
                yield from texts(datasets.load_dataset(LOADERS[kind], data_files=paths, split="train", streaming=True, **extra), "text" if kind == ".txt" else column, template, paths[0])
        elif len(source) > 1 or re.search(r"[*.]\w*$", source[0]) or source[0].startswith((".", os.sep)):
            raise SystemExit(f"{source[0]}: no such file")
        else:
            yield from texts(datasets.load_dataset(source[0], subset, split=split, streaming=True), column, template, source[0])
    except SystemExit:
        raise
    except Exception as e:  # the library raises a dozen kinds for no network, no such data set and no such subset
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        remedy = "check its contents" if local else "check the name and the network, or download its files and pass their paths"
        raise SystemExit(f"{source[0]}: {type(e).__name__}: {reason[:300]}; {remedy}")


def check_utf8(path):
    with open(path, "rb") as f:
        try:
            for block in iter(lambda: f.readline(CHUNK), b""):
                block.decode() if block.endswith(b"\n") or len(block) < CHUNK else block[:-4].decode(errors="strict" if block[-4] < 128 else "ignore")
        except UnicodeDecodeError as e:
            raise SystemExit(f"{path}: not UTF-8 near byte {f.tell()} ({e.reason}); convert it first, e.g. iconv -f latin1 -t utf-8")


def texts(rows, column, template, where):
    wanted = re.findall(r"{(\w+)}", template) if template else [column]
    for row in rows:
        missing = [name for name in wanted if name not in row]
        if missing:
            raise SystemExit(f"{where}: no column {missing[0]}; it has {', '.join(row)}; pass --column or --template")
        text = re.sub(r"{(\w+)}", lambda m, row=row: str(row[m[1]] or ""), template) if template else row[column]
        if text:
            yield text


# -----------------------------------------------------------------------------
# tokens, in the workers


def start_worker(kind):
    global bpe  # each worker process loads the tokenizer once
    bpe = gpt2_bpe() if kind == "gpt2" else None


def encode(task):
    """[(is_val, text)] -> (tokens of train, tokens of val, number of documents)."""
    out = ([], [])
    for is_val, text in task:
        if bpe is None:
            ids = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)
            out[is_val].append(np.append(ids, np.uint16(256)))
        else:
            out[is_val].append(np.array(bpe.encode_ordinary(text) + [bpe.eot_token], dtype=np.uint16))
    return [np.concatenate(part) if part else np.zeros(0, dtype=np.uint16) for part in out] + [len(task)]


def batches(docs, val_fraction):
    """Lists of (is_val, text) of about CHUNK characters."""
    task, size = [], 0
    for text in docs:
        digest = int.from_bytes(hashlib.sha256(text.encode(errors="replace")).digest()[:8], "little")
        task.append((digest < val_fraction * 2**64, text))
        size += len(text)
        if size >= CHUNK:
            yield task
            task, size = [], 0
    if task:
        yield task


def write(docs, out, tokenizer="gpt2", val_fraction=0.0005, workers=1, limit=None):
    """Tokenize docs into out/train.bin, out/val.bin and out/meta.json; returns {split: tokens}. SystemExit if a split stays empty."""
    from tqdm import tqdm
    if tokenizer == "gpt2":
        gpt2_bpe()  # here first: a missing vocabulary is one line, not one a worker
    os.makedirs(out, exist_ok=True)
    names = {split: os.path.join(out, f"{split}.bin") for split in ("train", "val")}
    files = {split: open(path + ".tmp", "wb") for split, path in names.items()}
    counts = dict.fromkeys(names, 0)
    documents_seen = 0
    try:
        with ProcessPoolExecutor(workers, initializer=start_worker, initargs=(tokenizer,)) as pool, tqdm(unit=" tokens", unit_scale=True) as bar:
            queue, source = [], batches(islice(docs, limit), val_fraction)
            while True:
                queue += [pool.submit(encode, task) for task in islice(source, 4 * workers - len(queue))]  # bounded: memory stays flat
                if not queue:
                    break
                train, val, n = queue.pop(0).result()  # in order: the files do not depend on the workers
                documents_seen += n
                for split, tokens in (("train", train), ("val", val)):
                    files[split].write(tokens.tobytes())
                    counts[split] += len(tokens)
                bar.update(len(train) + len(val))
        for split, f in files.items():
            if not counts[split]:
                raise SystemExit(f"{out}: {documents_seen} documents leave {split}.bin empty; " + ("pass more text" if split == "train" else "raise --val_fraction"))
            f.close()
        with open(os.path.join(out, "meta.json"), "w") as f:
            json.dump({"vocab_size": 257, "tokenizer": "bytes"} if tokenizer == "bytes" else {"vocab_size": 50304, "tokenizer": "gpt2"}, f)
        for path in names.values():
            os.replace(path + ".tmp", path)
    finally:
        for split, f in files.items():
            f.close()
            if os.path.exists(names[split] + ".tmp"):
                os.remove(names[split] + ".tmp")
    for split, n in counts.items():
        print(f"{names[split]}: {n:,} tokens")
    return counts


def main(name=None, source=None, doc=__doc__, **defaults):
    """The command line; data/<name>/prepare.py call it with their name and source."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if name is None:
        parser.add_argument("name", help="the data set's name: files go to data/<name>/")
        parser.add_argument("source", nargs="+", help="a data set on the Hugging Face hub, or local .txt, .jsonl, .parquet, .csv files")
    else:
        parser.add_argument("--source", nargs="+", default=source, help=f"local files of it instead of {source}")
    parser.add_argument("--subset", help="configuration of a hub data set")
    parser.add_argument("--split", help="split of a hub data set (default: train)")
    parser.add_argument("--column", help="column that holds the text (default: text)")
    parser.add_argument("--template", help=r"text made of several columns, e.g. 'Q: {question}\nA: {answer}'")
    parser.add_argument("--tokenizer", choices=("gpt2", "bytes"), help="GPT-2's BPE (default) or bytes")
    parser.add_argument("--val_fraction", type=float, help="fraction of documents for validation (default: 0.0005)")
    parser.add_argument("--limit", type=int, help="only the first so many documents: a taste")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: all cores)")
    parser.add_argument("--out", help="another directory")
    given = vars(parser.parse_args())
    args = {**dict(subset=None, split="train", column="text", template=None, tokenizer="gpt2", val_fraction=0.0005), **defaults,
            **{k: v for k, v in given.items() if v is not None}}
    if not 0 < args["val_fraction"] < 1 or args["workers"] < 1 or (args.get("limit") or 1) < 1:
        raise SystemExit("--val_fraction must be between 0 and 1, --workers and --limit at least 1")
    template = args["template"] and args["template"].replace("\\n", "\n")
    docs = documents(args["source"] if isinstance(args["source"], list) else [args["source"]], args["subset"], args["split"], args["column"], template)
    out = args.get("out") or os.path.join(os.path.dirname(os.path.abspath(__file__)), name or args["name"])
    write(docs, out, args["tokenizer"], args["val_fraction"], args["workers"], args.get("limit"))


if __name__ == "__main__":
    main()
