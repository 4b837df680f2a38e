"""
GPT-2, Llama (Llama 1 to 3, TinyLlama, SmolLM2) and Qwen3 in Hugging Face's format, in and out.

    python train.py config/finetune_smollm2.py --init_from=HuggingFaceTB/SmolLM2-360M   # the hub's
    python train.py ... --init_from=DIR    # config.json and model.safetensors, or its shards
    python huggingface.py out-x DIR --dtype=bfloat16    # out-x's newest checkpoint to transformers
"""

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import asdict
from pathlib import Path

import torch

from checkpoint import BUFFERS, Source, atomic, first_line, open_newest, writing
from configurator import DTYPES, model_file
from data.loader import data_dir, read_meta
from data.tokenizer import TOKENIZER, local_copy
from metrics import optional
from ranks import run

# {our key: theirs}
GPT2 = dict(n_layer="n_layer", n_head="n_head", n_embd="n_embd", vocab_size="vocab_size",
            block_size="n_positions")
LLAMA = dict(n_layer="num_hidden_layers", n_head="num_attention_heads", norm_eps="rms_norm_eps",
             n_kv_head="num_key_value_heads", n_embd="hidden_size", n_inner="intermediate_size",
             head_dim="head_dim", rope_theta="rope_theta", tie_embeddings="tie_word_embeddings",
             vocab_size="vocab_size", block_size="max_position_embeddings")
# what our models compute: {their key: values that mean it}; the first is what an absent key means
GPT2_IS = dict(activation_function=["gelu_new", "gelu_pytorch_tanh"], layer_norm_epsilon=[1e-5],
               scale_attn_weights=[True], scale_attn_by_inverse_layer_idx=[False], n_inner=[None],
               add_cross_attention=[False], tie_word_embeddings=[True], quantization_config=[None])
LLAMA_IS = dict(hidden_act=["silu"], attention_bias=[False], mlp_bias=[False],
                use_sliding_window=[False], quantization_config=[None])
ARCHITECTURES = {  # {their model_type: (their class, our model, keys, what it is)}
    "gpt2": ("GPT2LMHeadModel", "gpt2", GPT2, GPT2_IS),
    "llama": ("LlamaForCausalLM", "llama", LLAMA, LLAMA_IS),
    "qwen3": ("Qwen3ForCausalLM", "llama", LLAMA, LLAMA_IS)}
LLAMA3 = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8192)  # beside a factor
# what an export needs and a checkpoint would lose: where text ends, and how chats are written
KEPT = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
        "chat_template.jinja")
# GPT-2's own code multiplies x @ W, nn.Linear x @ W.T: these four matrices are stored transposed
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def open_pretrained(name):
    """A Source from a local directory, or from the hub ('gpt2', 'org/model'); or a SystemExit."""
    safe_open = optional("safetensors", f"init_from={name}").safe_open
    path = Path(local_copy("init_from", name, "model*.safetensors*", TOKENIZER, *KEPT))
    where, shapes = {}, {}  # of our keys: (file, their key); shape
    try:
        model, args = understand(json.loads((path / "config.json").read_text("utf-8")))
        args = asdict(model_file(model).ModelConfig(**args))
        for file in sorted(path.glob("model*-of-*.safetensors")) or [path / "model.safetensors"]:
            with safe_open(file, "pt") as opened:
                for key in opened.keys():
                    if key.endswith(BUFFERS):
                        continue
                    ours, tensor = f"model.{key}", opened.get_slice(key)
                    if tensor.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                        raise ValueError(f"{key} is {tensor.get_dtype()}, not floats")
                    if model == "gpt2" and key != "lm_head.weight":  # the hub's has no prefix
                        ours = "model.transformer." + key.removeprefix("transformer.")
                    where[ours], shape = (file, key), tuple(tensor.get_shape())
                    shapes[ours] = shape[::-1] if key.endswith(TRANSPOSED) else shape
    except Exception as e:
        raise SystemExit(f"{path}: not a model in Hugging Face format, config.json and "
                         f"*.safetensors, that we compute ({type(e).__name__}: {first_line(e)})")

    def get(ours):  # a view of the mapped file, in its type
        file, key = where[ours]
        tensor = safe_open(file, "pt").get_tensor(key)
        return tensor.t() if key.endswith(TRANSPOSED) else tensor

    kept = {file: (path / file).read_text("utf-8") for file in KEPT if (path / file).exists()}
    header = dict(iter_num=0, best_val_loss=1e9, model_args=args, config={"model": model},
                  shapes=shapes, scaler=None, kept=kept)
    return Source(str(path), header, get)


def understand(theirs):
    """(our model, values of its config) of a config.json; ValueError for what we do not compute."""
    kind = theirs.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"model_type={kind!r} is none of {', '.join(ARCHITECTURES)}")
    _, model, keys, is_ = ARCHITECTURES[kind]
    args = {ours: theirs[key] for ours, key in keys.items() if theirs.get(key) is not None}
    if kind == "gpt2":
        args["bias"] = True
        is_ = {**is_, "n_inner": [None, 4 * args["n_embd"]]}
    else:
        # rope_parameters is transformers 5's name; before, rope_theta stood beside rope_scaling
        rope = {"rope_type": "default", "rope_theta": theirs.get("rope_theta") or 1e4,
                **(theirs.get("rope_scaling") or {}), **(theirs.get("rope_parameters") or {})}
        llama3 = rope.items() >= LLAMA3.items()
        if not llama3 and {rope["rope_type"], rope.get("type", "default")} != {"default"}:
            raise ValueError(f"rotary positions {rope}, and llama computes Llama 3's scaling only")
        args = {"n_kv_head": args["n_head"], "tie_embeddings": False, **args,
                "qk_norm": kind == "qwen3", "rope_theta": rope["rope_theta"],
                "rope_factor": rope["factor"] if llama3 else 1.0}
        if args.get("head_dim") == args["n_embd"] // args["n_head"]:
            args["head_dim"] = 0  # ours for that
    for key, values in is_.items():
        if theirs.get(key, values[0]) not in values:
            raise ValueError(f"{key}={theirs[key]!r}, and {model} computes {values[0]!r} only")
    return model, args


def export(source, path, dtype="float32"):
    """A directory that transformers opens, with equal logits. Takes host memory for the model."""
    args, config = source.header["model_args"], source.header["config"]
    model = config.get("model", "gpt2")
    kind = "qwen3" if args.get("qk_norm") else model
    if kind not in ARCHITECTURES:
        raise SystemExit(f"{source.path} holds model={model}, which has no Hugging Face format")
    name, _, keys, is_ = ARCHITECTURES[kind]
    theirs = {key: values[0] for key, values in is_.items() if values[0] is not None}
    theirs.update({key: args[ours] for ours, key in keys.items()}, model_type=kind,
                  architectures=[name], dtype=dtype)
    kept = source.header.get("kept") or {}  # of the model that training began with
    origin = json.loads(kept.get("config.json", '{"bos_token_id": null, "eos_token_id": null}'))
    theirs.update({key: origin[key] for key in origin if key.endswith("_token_id")})
    if model == "gpt2":
        theirs.update(dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), args["dropout"]))
    else:
        longest = max(args["block_size"], origin.get("max_position_embeddings") or 0)
        theirs["max_position_embeddings"] = longest  # rotary: a shorter training takes none away
        theirs["head_dim"] = args["head_dim"] or args["n_embd"] // args["n_head"]
        if args["rope_factor"] > 1:
            theirs["rope_scaling"] = dict(LLAMA3, factor=args["rope_factor"])
    tensors = {}
    for key, shape in source.header["shapes"].items():
        state, _, name = key.partition(".")
        if state != "model" or (theirs["tie_word_embeddings"] and name == "lm_head.weight"):
            continue  # the optimizer's; or tied, and transformers ties it again
        tensor = source.get(key).to(DTYPES[dtype])
        tensors[name] = tensor.t().contiguous() if name.endswith(TRANSPOSED) else tensor
        embedding = name.endswith(("wte.weight", "wpe.weight"))
        if model == "gpt2" and not args["bias"] and not embedding:  # their GPT-2 has biases
            tensors[name.replace("weight", "bias")] = torch.zeros(shape[0], dtype=tensor.dtype)
    save = optional("safetensors.torch", "a Hugging Face directory").save
    files = {file: kept[file].encode() for file in KEPT if file in kept}
    files["model.safetensors"] = save(tensors, {"format": "pt"})
    files["config.json"] = json.dumps(theirs, indent=2).encode()
    directory = data_dir(config.get("dataset", ""))
    with writing(path):
        Path(path).mkdir(parents=True, exist_ok=True)
        if read_meta(directory).get("tokenizer") == TOKENIZER:
            files[TOKENIZER] = Path(directory, TOKENIZER).read_bytes()
        for file, data in files.items():
            atomic(f"{path}/{file}", lambda f, data=data: f.write(data))


def main(argv):
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.error = sys.exit  # one line and exit code 1, as everywhere here
    parser.add_argument("out_dir", help="of a run")
    parser.add_argument("directory", help="to write")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args(argv)
    source = open_newest(args.out_dir)
    export(source, args.directory, args.dtype)
    print(f"{source.path} -> {args.directory}, for AutoModelForCausalLM.from_pretrained")


if __name__ == "__main__":
    run(main, sys.argv[1:])
