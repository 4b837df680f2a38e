"""
Files: what a run leaves on disk and how another run, or another program, picks it up.

| what                | file                          | written by                    | read by                          |
|---------------------|-------------------------------|-------------------------------|----------------------------------|
| full                | out_dir/ckpt.pt               | any strategy and world size   | any other; nanoGPT               |
| full, pre-emption   | out_dir/last.pt               | a stop signal, where ckpt.pt holds the best | any other; nanoGPT |
| sharded             | out_dir/step-<n>/ + latest    | every rank its own rows       | any strategy and world size      |
| Hugging Face        | a directory with safetensors  | `checkpoint.py hf`            | transformers; init_from=<dir>    |

    python checkpoint.py full out-x           # the newest checkpoint of out-x, if sharded, as out-x/ckpt.pt
    python checkpoint.py hf out-x gpt2-x      # the newest checkpoint of out-x as a directory for transformers

Every file gets a temporary name, is synced and then renamed: what carries its final name is complete, whenever the
process died. A full state goes through rank 0's host memory one parameter at a time (gather_full, scatter_full).
Everything is read with weights_only=True: a checkpoint cannot run code.
"""

import glob
import json
import os
import shutil
import sys
from contextlib import contextmanager

import torch
import torch.distributed as td

from fsdp import agree, gather_full, reshard, run, scatter_full

MOMENTS = ("exp_avg", "exp_avg_sq")
ARCHITECTURE = ("n_layer", "n_head", "n_embd", "bias", "vocab_size", "block_size")

# -----------------------------------------------------------------------------
# atomic files


@contextmanager
def atomic(path):
    """A temporary name to write; synced and renamed to path when the block ends well, removed when it does not."""
    tmp = path + ".tmp"
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    try:
        yield tmp
        sync(tmp)
        os.replace(tmp, path)
        sync(os.path.dirname(path) or ".")  # the rename itself
    except BaseException:
        if os.path.exists(tmp):
            os.remove(tmp)
        raise


def sync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def on_rank0(dist, action, what):
    """Do action on rank 0; if it fails, every rank ends with one line (collective)."""
    problem = None
    if dist.rank == 0:
        try:
            action()
        except (OSError, RuntimeError) as e:  # torch.save raises RuntimeError when the disk is full
            problem = f"cannot write {what}: {str(e).splitlines()[0]}; the previous checkpoint is untouched. Free space or pass another --out_dir"
    problem = agree(dist, problem)
    if problem:
        raise SystemExit(problem)


# -----------------------------------------------------------------------------
# saving


def names_of(gpt, optimizer):
    """Parameter names in the optimizer's order: its integer keys (nanoGPT's: first what decays, then what does not)."""
    names = {id(p): name for name, p in gpt.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def numbered(groups):
    """The optimizer's param_groups with integers for parameters, as Optimizer.state_dict writes them."""
    counts = [len(group["params"]) for group in groups]
    return [{**group, "params": list(range(sum(counts[:i]), sum(counts[:i + 1])))} for i, group in enumerate(groups)]


def save_full(path, gpt, optimizer, header, dist):
    """One portable file in nanoGPT's layout (all ranks: it gathers, one tensor at a time, to rank 0)."""
    reshard(gpt)
    model = {name: gather_full(p, dist) for name, p in gpt.named_parameters()}
    model["lm_head.weight"] = model["transformer.wte.weight"]  # tied: gathered and stored once, under both names
    state = {}
    for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if p in optimizer.state:
            s = optimizer.state[p]
            state[i] = {"step": s["step"].cpu(), **{key: gather_full(s[key], dist) for key in MOMENTS}}
    payload = {"model": model, "optimizer": {"state": state, "param_groups": numbered(optimizer.param_groups)},
               "param_names": names_of(gpt, optimizer), **header}

    def write():
        with atomic(path) as tmp:
            torch.save(payload, tmp)
    on_rank0(dist, write, path)


class ShardedSaver:
    """
    Sharded checkpoints: every rank writes its rows in the background while training goes on.

    save() copies the state to host memory and returns; poll() moves out_dir/latest once all ranks' files are
    complete, and prunes; wait() blocks until then. All ranks call save() and wait(); poll() is rank 0's.
    """

    def __init__(self, out_dir, keep, dist):
        self.out_dir, self.keep, self.dist = out_dir, keep, dist
        self.pending = None  # (directory, future)
        # a group of its own: the background thread's collectives must not mix with the training loop's
        self.group = td.new_group(backend="gloo") if td.is_initialized() else None

    def save(self, gpt, optimizer, header):
        import torch.distributed.checkpoint as dcp
        self.wait()
        reshard(gpt)
        name = f"step-{header['iter_num']:09d}"
        path = os.path.join(self.out_dir, name)
        if agree(self.dist, latest(self.out_dir) == path):
            return  # a resumed run is back where it started: that state is there already
        tensors, steps = sharded_state(gpt, optimizer), {}
        for param, p in gpt.named_parameters():
            if p in optimizer.state:
                steps[param] = float(optimizer.state[p]["step"])

        def prepare():
            shutil.rmtree(path, ignore_errors=True)  # a half-written one of a run that died here
            os.makedirs(path)
            torch.save({"param_names": names_of(gpt, optimizer), "param_groups": numbered(optimizer.param_groups), "steps": steps, **header},
                       os.path.join(path, "header.pt"))
        on_rank0(self.dist, prepare, path)
        try:
            if self.group is None:  # one process without a process group: PyTorch saves this in the foreground only
                dcp.save(tensors, checkpoint_id=path, no_dist=True)
                self.pending = (path, None)
            else:
                self.pending = (path, dcp.async_save(tensors, checkpoint_id=path, process_group=self.group))
        except Exception as e:
            raise SystemExit(f"cannot write {path}: {last_line(e)}; {self.out_dir}/latest still names the previous checkpoint")
        self.poll()

    def poll(self):
        """If the files of the pending save are complete, say so on disk."""
        if self.pending is None or self.pending[1] is not None and not self.pending[1].done():
            return
        path, future = self.pending
        self.pending = None
        try:
            if future is not None:
                future.result()
            if self.dist.rank == 0:
                sync(path)
                with atomic(os.path.join(self.out_dir, "latest")) as tmp, open(tmp, "w") as f:
                    f.write(os.path.basename(path) + "\n")
                for old in sorted(glob.glob(os.path.join(self.out_dir, "step-*")))[:-self.keep]:
                    if old != path:
                        shutil.rmtree(old, ignore_errors=True)
        except Exception as e:
            raise SystemExit(f"cannot write {path}: {last_line(e)}; {self.out_dir}/latest still names the previous checkpoint")

    def wait(self):
        if self.pending and self.pending[1] is not None:
            try:
                self.pending[1].result()
            except Exception:
                pass  # poll reports it
        self.poll()
        agree(self.dist, None)  # nobody goes on before `latest` has moved


def sharded_state(gpt, optimizer):
    """{key: tensor or DTensor} for torch.distributed.checkpoint, by parameter name, tied weights once."""
    tensors = {}
    for name, p in gpt.named_parameters():
        tensors[f"model.{name}"] = p.detach()
        for key in MOMENTS if optimizer is not None and p in optimizer.state else ():
            tensors[f"{key}.{name}"] = optimizer.state[p][key]
    return tensors


def last_line(e):
    return (str(e).strip() or type(e).__name__).splitlines()[-1].strip()


# -----------------------------------------------------------------------------
# finding and opening


def latest(out_dir):
    """The directory of the last complete sharded checkpoint, or None."""
    try:
        with open(os.path.join(out_dir, "latest")) as f:
            return os.path.join(out_dir, f.read().strip())
    except FileNotFoundError:
        return None


class Source:
    """An opened checkpoint on rank 0: `header` (plain values), `get(key)` -> whole tensor on the CPU; on other ranks only the header."""

    def __init__(self, path, header, get=None, directory=None):
        self.path, self.header, self.get, self.directory = path, header, get, directory


def open_full(path):
    """ckpt.pt of ours or of nanoGPT. Raises ValueError with one line if it is not readable as one."""
    try:
        # mmap: a tensor's bytes are read when it is used, so that memory holds one at a time
        ckpt = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        model = {}
        for key, value in ckpt.pop("model").items():
            key = key.removeprefix("module.").removeprefix("_orig_mod.")  # left by DDP and torch.compile in nanoGPT's files
            if not key.endswith(".attn.bias"):  # nanoGPT's causal mask, a buffer
                model[f"model.{key}"] = value
        optimizer = ckpt.pop("optimizer", {"state": {}})["state"]
        header = {key: ckpt[key] for key in ("iter_num", "best_val_loss", "model_args", "config")}
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file")
    except Exception as e:  # a damaged zip or pickle raises almost anything
        raise ValueError(f"{path}: not a readable checkpoint ({type(e).__name__}: {last_line(e)}); remove it, or resume from another out_dir")
    shapes = {key[6:]: value.shape for key, value in model.items()}
    shapes.pop("lm_head.weight", None)  # the second name of wte
    # nanoGPT does not store names: its optimizer numbers first the matrices, then the vectors, in the model's order
    names = ckpt.get("param_names") or [n for n in shapes if len(shapes[n]) >= 2] + [n for n in shapes if len(shapes[n]) < 2]
    for i, s in optimizer.items():
        for key in MOMENTS:
            model[f"{key}.{names[i]}"] = s[key]
    header.update(best_val_loss=float(header["best_val_loss"]), steps={names[i]: float(s["step"]) for i, s in optimizer.items()},
                  shapes={n: tuple(s) for n, s in shapes.items()}, scaler=ckpt.get("scaler"))
    return Source(path, header, model.__getitem__)


def open_sharded(path):
    """A sharded directory of ours. Raises ValueError with one line if it is not complete."""
    from torch.distributed.checkpoint import FileSystemReader
    try:
        header = torch.load(os.path.join(path, "header.pt"), weights_only=True)
        entries = FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as e:
        raise ValueError(f"{path}: not a complete sharded checkpoint ({type(e).__name__}: {last_line(e)}); remove it, or resume from another out_dir")
    header["shapes"] = {key[6:]: tuple(m.size) for key, m in entries.items() if key.startswith("model.")}

    def get(key):
        import torch.distributed.checkpoint as dcp
        box = {key: torch.empty(entries[key].size, dtype=entries[key].properties.dtype)}
        dcp.load(box, checkpoint_id=path, no_dist=True)
        return box[key]
    return Source(path, header, get, directory=path)


def open_huggingface(name):
    """GPT-2 in Hugging Face format: a local directory, or 'gpt2', 'gpt2-medium', '-large', '-xl' from the hub. ValueError with one line."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise ValueError(f"init_from={name} reads safetensors files: pip install safetensors")
    path = name
    if not os.path.isdir(name):
        try:
            from huggingface_hub import snapshot_download
            path = snapshot_download(name if "/" in name else f"openai-community/{name}", allow_patterns=["config.json", "*.safetensors*"])
        except Exception as e:
            raise ValueError(f"init_from={name}: neither a directory here nor reachable on the Hugging Face hub ({type(e).__name__}); "
                             "without a network pass a local directory with config.json and model.safetensors")
    try:
        with open(os.path.join(path, "config.json")) as f:
            hf = json.load(f)
        args = dict(n_layer=hf["n_layer"], n_head=hf["n_head"], n_embd=hf["n_embd"], vocab_size=hf["vocab_size"],
                    block_size=hf["n_positions"], bias=True, dropout=0.0)
        files = {key: file for file in sorted(glob.glob(os.path.join(path, "*.safetensors"))) for key in safe_open(file, "pt").keys()}
        prefix = "" if "wte.weight" in files else "transformer."  # the hub's gpt2 has none, save_pretrained writes one

        def get(key):
            key = key.removeprefix("model.").removeprefix("transformer.")
            tensor = safe_open(files[prefix + key], "pt").get_tensor(prefix + key).float()
            return tensor.t() if is_conv1d(key) else tensor
        shapes = {"transformer." + key.removeprefix(prefix): tuple(safe_open(file, "pt").get_slice(key).get_shape()) for key, file in files.items()
                  if not key.endswith((".attn.bias", ".attn.masked_bias", "lm_head.weight"))}
        shapes = {key: shape[::-1] if is_conv1d(key) else shape for key, shape in shapes.items()}
    except Exception as e:
        raise ValueError(f"{path}: not a GPT-2 in Hugging Face format, config.json and *.safetensors ({type(e).__name__}: {last_line(e)})")
    return Source(path, dict(iter_num=0, best_val_loss=1e9, model_args=args, config={}, steps={}, shapes=shapes, scaler=None), get)


def is_conv1d(key):
    """GPT-2's own code multiplies x @ W, nn.Linear x @ W.T: these four matrices are stored transposed."""
    return key.endswith(("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"))


def find(out_dir):
    """The newest complete checkpoint of either kind in out_dir as a Source, or None. Raises ValueError if there are only damaged ones."""
    found, problems = [], []
    paths = [(open_full, p) for p in (os.path.join(out_dir, "ckpt.pt"), os.path.join(out_dir, "last.pt")) if os.path.exists(p)]
    paths += [(open_sharded, p) for p in sorted(glob.glob(os.path.join(out_dir, "step-*"))) if p == latest(out_dir) or os.path.exists(os.path.join(p, ".metadata"))]
    for opener, path in paths:
        try:
            found.append(opener(path))
        except ValueError as e:
            problems.append(str(e))
    if problems and not found:
        raise ValueError(problems[0])
    for problem in problems:
        print(f"skipping {problem}", file=sys.stderr)
    return max(found, key=lambda s: s.header["iter_num"], default=None)


def open_source(init_from, out_dir, dist):
    """The Source that init_from names, its header on every rank; None for a fresh start. SystemExit if it is missing or damaged (all ranks)."""
    source = problem = None
    if dist.rank == 0:
        try:
            if init_from in ("resume", "auto"):
                source = find(out_dir)
                if source is None and init_from == "resume":
                    raise ValueError(f"init_from=resume: no checkpoint in out_dir={out_dir}; use init_from=scratch, or auto to resume only if there is one")
            elif init_from != "scratch":
                source = open_huggingface(init_from)
        except ValueError as e:
            problem = str(e)
    problem, header, path, directory = agree(dist, (problem, source and source.header, source and source.path, source and source.directory))
    if problem:
        raise SystemExit(problem)
    return source if source or header is None else Source(path, header, directory=directory)


# -----------------------------------------------------------------------------
# loading


def check(source, model_args):
    """Does the checkpoint hold this architecture? SystemExit with the key, both values and the remedy. A longer context may be cropped."""
    for key in ARCHITECTURE:
        theirs, ours = source.header["model_args"][key], model_args[key]
        if theirs != ours and not (key == "block_size" and ours < theirs and source.directory is None):
            raise SystemExit(f"{key}={ours} in the config, but {source.path} has {key}={theirs}; pass --{key}={theirs}, or another out_dir")


def load(source, gpt, optimizer, dist):
    """Weights, and the moments of what trains, into gpt and optimizer as they are sharded now (collective)."""
    shapes = source.header["shapes"]
    missing = [n for n, p in gpt.named_parameters() if shapes.get(n, ())[1:] != tuple(p.shape)[1:] or not shapes.get(n, (0,))[0] >= p.shape[0]]
    if missing:
        raise SystemExit(f"{source.path}: {missing[0]} is missing or has shape {shapes.get(missing[0])}; it belongs to another model")
    for name, p in gpt.named_parameters():
        if optimizer is not None and p.requires_grad and name in source.header["steps"]:
            fused = optimizer.param_groups[0]["fused"]
            optimizer.state[p] = {"step": torch.tensor(source.header["steps"][name], device=p.device if fused else "cpu"),
                                  **{key: torch.zeros_like(p) for key in MOMENTS}}
    tensors = sharded_state(gpt, optimizer)
    if source.directory:
        import torch.distributed.checkpoint as dcp
        dcp.load(tensors, checkpoint_id=source.directory, no_dist=not td.is_initialized())
        return
    for key, t in tensors.items():
        full = source.get(key)[:t.shape[0]] if dist.rank == 0 else None  # fewer rows: wpe, when the context is cropped
        scatter_full(t, full, dist)


# -----------------------------------------------------------------------------
# the commands


def full_payload(source):
    """What save_full would have written for this source; on one process, tensors straight from the files."""
    h = source.header
    model = {name: source.get(f"model.{name}") for name in h["shapes"]}
    model["lm_head.weight"] = model["transformer.wte.weight"]
    state = {i: {"step": torch.tensor(h["steps"][n]), **{key: source.get(f"{key}.{n}") for key in MOMENTS}}
             for i, n in enumerate(h["param_names"]) if n in h["steps"]}
    return {"model": model, "optimizer": {"state": state, "param_groups": h["param_groups"]},
            **{key: h[key] for key in ("param_names", "iter_num", "best_val_loss", "model_args", "config", "scaler")}}


def export_huggingface(source, path):
    """Write source's weights as a directory that transformers.GPT2LMHeadModel.from_pretrained opens with equal logits."""
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise SystemExit("writing safetensors files needs: pip install safetensors")
    args = source.header["model_args"]
    tensors = {}
    for name, shape in source.header["shapes"].items():
        value = source.get(f"model.{name}").float()
        tensors[name] = (value.t() if is_conv1d(name) else value).contiguous()
        if name.endswith(".weight") and not args["bias"] and name.split(".")[-2] not in ("wte", "wpe"):
            tensors[name.removesuffix("weight") + "bias"] = torch.zeros(shape[0])  # GPT-2 has biases; ours without are zero
    config = dict(architectures=["GPT2LMHeadModel"], model_type="gpt2", activation_function="gelu_new", layer_norm_epsilon=1e-5,
                  n_layer=args["n_layer"], n_head=args["n_head"], n_embd=args["n_embd"], vocab_size=args["vocab_size"],
                  n_positions=args["block_size"], n_ctx=args["block_size"], tie_word_embeddings=True,
                  resid_pdrop=args["dropout"], embd_pdrop=args["dropout"], attn_pdrop=args["dropout"])
    os.makedirs(path, exist_ok=True)
    with atomic(os.path.join(path, "model.safetensors")) as tmp:
        save_file(tensors, tmp, metadata={"format": "pt"})
    with atomic(os.path.join(path, "config.json")) as tmp, open(tmp, "w") as f:
        json.dump(config, f, indent=2)


def main(argv):
    if len(argv) not in (2, 3) or argv[0] not in ("full", "hf") or (argv[0] == "hf") != (len(argv) == 3):
        raise SystemExit(__doc__.strip() if "--help" in argv else "usage: python checkpoint.py full OUT_DIR | python checkpoint.py hf OUT_DIR HF_DIR")
    try:
        source = find(argv[1])
        if source is None:
            raise ValueError(f"{argv[1]}: no checkpoint there")
        if argv[0] == "hf":
            export_huggingface(source, argv[2])
            print(f"{source.path} -> {argv[2]}: transformers.GPT2LMHeadModel.from_pretrained('{argv[2]}')")
        elif source.directory is None:
            print(f"{source.path} is a full checkpoint already")
        else:
            target = os.path.join(argv[1], "ckpt.pt")
            with atomic(target) as tmp:
                torch.save(full_payload(source), tmp)
            print(f"{source.path} -> {target}")
    except (ValueError, OSError) as e:
        raise SystemExit(str(e))


if __name__ == "__main__":
    run(main, sys.argv[1:])
