"""
GPT-2 in Hugging Face's format, in and out.

    python train.py config/finetune_shakespeare.py --init_from=gpt2     # from the hub
    python train.py ... --init_from=DIR                                 # config.json, *.safetensors
    python huggingface.py out-x DIR     # the newest checkpoint of out-x, for transformers

Tensors are read from the files one at a time.
"""

import glob
import json
import os
import sys

import torch

from checkpoint import Source, atomic, first_line, open_newest
from metrics import optional
from ranks import run

# GPT-2's own code multiplies x @ W, nn.Linear x @ W.T: these four matrices are stored transposed
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def open_pretrained(name):
    """A Source from a local directory, or from the hub ('gpt2', 'org/model'); or a SystemExit."""
    safe_open = optional("safetensors", f"init_from={name}").safe_open
    path = name
    if not os.path.isdir(name):
        try:
            from huggingface_hub import snapshot_download
            path = snapshot_download(name if "/" in name else f"openai-community/{name}",
                                     allow_patterns=["config.json", "*.safetensors*"])
        except Exception as e:
            raise SystemExit(f"init_from={name}: neither a directory here nor on the Hugging Face "
                             f"hub ({type(e).__name__}); without a network pass a local directory")
    try:
        with open(os.path.join(path, "config.json")) as f:
            theirs = json.load(f)
        files = {}
        for file in sorted(glob.glob(os.path.join(path, "*.safetensors"))):
            files.update(dict.fromkeys(safe_open(file, "pt").keys(), file))
        args = dict(n_layer=theirs["n_layer"], n_head=theirs["n_head"], n_embd=theirs["n_embd"],
                    vocab_size=theirs["vocab_size"], block_size=theirs["n_positions"], bias=True,
                    dropout=0.0)
        # the hub's gpt2 has no prefix; save_pretrained writes "transformer."
        prefix = "" if "wte.weight" in files else "transformer."
        shapes = {}
        for key, file in files.items():
            shape = tuple(safe_open(file, "pt").get_slice(key).get_shape())
            ours = "model.transformer." + key.removeprefix(prefix)
            shapes[ours] = shape[::-1] if key.endswith(TRANSPOSED) else shape
    except Exception as e:
        raise SystemExit(f"{path}: not a GPT-2 in Hugging Face format, config.json and "
                         f"*.safetensors ({type(e).__name__}: {first_line(e)})")

    def get(key):
        theirs = prefix + key.removeprefix("model.transformer.")
        tensor = safe_open(files[theirs], "pt").get_tensor(theirs).float()
        return tensor.t() if theirs.endswith(TRANSPOSED) else tensor

    header = dict(iter_num=0, best_val_loss=1e9, model_args=args, config={"model": "gpt2"},
                  shapes=shapes, scaler=None)
    return Source(path, header, get)


def export(source, path):
    """A directory that transformers.GPT2LMHeadModel.from_pretrained opens with equal logits."""
    optional("safetensors", "writing safetensors files")
    from safetensors.torch import save_file
    args, model = source.header["model_args"], source.header["config"].get("model", "gpt2")
    if model != "gpt2":
        raise SystemExit(f"{source.path} holds model={model}; only gpt2 has this format")
    tensors = {}
    for key, shape in source.header["shapes"].items():
        kind, _, name = key.partition(".")
        if kind != "model" or name == "lm_head.weight":  # tied: transformers ties it again
            continue
        tensor = source.get(key).float()
        tensors[name] = (tensor.t() if name.endswith(TRANSPOSED) else tensor).contiguous()
        embedding = name.endswith(("wte.weight", "wpe.weight"))
        if not args["bias"] and name.endswith("weight") and not embedding:
            tensors[name.removesuffix("weight") + "bias"] = torch.zeros(shape[0])  # GPT-2 has them
    config = dict(
        architectures=["GPT2LMHeadModel"], model_type="gpt2", activation_function="gelu_new",
        layer_norm_epsilon=1e-5, n_layer=args["n_layer"], n_head=args["n_head"],
        n_embd=args["n_embd"], vocab_size=args["vocab_size"], n_positions=args["block_size"],
        n_ctx=args["block_size"], tie_word_embeddings=True, resid_pdrop=args["dropout"],
        embd_pdrop=args["dropout"], attn_pdrop=args["dropout"])
    os.makedirs(path, exist_ok=True)
    with atomic(os.path.join(path, "model.safetensors")) as tmp:
        save_file(tensors, tmp, metadata={"format": "pt"})
    with atomic(os.path.join(path, "config.json")) as tmp, open(tmp, "w") as f:
        json.dump(config, f, indent=2)


def main(argv):
    if "--help" in argv or "-h" in argv:
        return print(__doc__.strip())
    if len(argv) != 2:
        raise SystemExit("usage: python huggingface.py OUT_DIR HUGGING_FACE_DIR")
    source = open_newest(argv[0])
    try:
        export(source, argv[1])
    except OSError as e:
        raise SystemExit(f"{argv[1]}: {e}; pass a directory that can be written")
    print(f"{source.path} -> {argv[1]}: GPT2LMHeadModel.from_pretrained('{argv[1]}')")


if __name__ == "__main__":
    run(main, sys.argv[1:])
