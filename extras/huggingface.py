"""
GPT-2, Llama (1 to 3, TinyLlama, SmolLM2) and Qwen3 in Hugging Face's format, in and out.

    python train.py extras/config/finetune_smollm2.py --init_from=HuggingFaceTB/SmolLM2-360M
    python train.py ... --init_from=DIR    # config.json, and model.safetensors or shards
    python -m extras.huggingface out-x DIR --dtype=bfloat16    # out-x's newest checkpoint
    python -m extras.huggingface out-lora DIR                  # merges LoRA's adapters
    python -m extras.huggingface out-lora DIR --adapter        # adapters only, in peft's layout

The export includes the data set's tokenizer: a tokenizer.json with its chat template; GPT-2's and
bytes are converted to one.
"""

import json
import os
import re
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import asdict, replace
from pathlib import Path

import torch

# Started by its path, this file does not see the repository.
sys.path.insert(0, str(Path(__file__).absolute().parents[1]))
from checkpoint import BUFFERS, Source, cannot_write
from configurator import DTYPES, Config, make_config, model_file, package
from data.files import write_files
from data.loader import data_dir, read_meta
from data.tokenizer import TOKENIZER, encoder, gpt2_bpe, name_of
from extras.hf_tokenizer import BESIDE, local_copy
from ranks import World, first_line, run
from start import open_source, with_own_files

# ---------- their names and ours ----------------------------------------------


# keys: {our key: theirs}. fixed: {their key: the values that our model computes};
# values[0] is the default.
GPT2 = dict(
    name="GPT2LMHeadModel",  # transformers' class
    model="gpt2",  # our --model
    keys=dict(
        n_layer="n_layer",
        n_head="n_head",
        n_embd="n_embd",
        vocab_size="vocab_size",
        block_size="n_positions",
    ),
    fixed=dict(
        activation_function=["gelu_new", "gelu_pytorch_tanh"],
        layer_norm_epsilon=[1e-5],
        scale_attn_weights=[True],
        scale_attn_by_inverse_layer_idx=[False],
        add_cross_attention=[False],
        tie_word_embeddings=[True],
        quantization_config=[None],
    ),
)
LLAMA = dict(
    name="LlamaForCausalLM",
    model="llama",
    keys=dict(
        n_layer="num_hidden_layers",
        n_head="num_attention_heads",
        n_kv_head="num_key_value_heads",
        n_embd="hidden_size",
        n_inner="intermediate_size",
        head_dim="head_dim",
        norm_eps="rms_norm_eps",
        rope_theta="rope_theta",
        tie_embeddings="tie_word_embeddings",
        vocab_size="vocab_size",
        block_size="max_position_embeddings",
    ),
    fixed=dict(
        hidden_act=["silu"],
        attention_bias=[False],
        mlp_bias=[False],
        use_sliding_window=[False],
        quantization_config=[None],
    ),
)
QWEN3 = dict(LLAMA, name="Qwen3ForCausalLM")  # and qk_norm
ARCHITECTURES = {"gpt2": GPT2, "llama": LLAMA, "qwen3": QWEN3}  # by their model_type
# Llama 3.1's stretching of rotary positions, beside its factor.
LLAMA3_SCALING = dict(
    rope_type="llama3",
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
# GPT-2's own code multiplies by W, nn.Linear by W.T, so files keep these four transposed.
TRANSPOSED = (
    "attn.c_attn.weight",
    "attn.c_proj.weight",
    "mlp.c_fc.weight",
    "mlp.c_proj.weight",
)
# The values that peft's adapter_config.json may have; values[0] is the default.
PEFT = dict(
    peft_type=["LORA"],
    bias=["none"],
    use_dora=[False],
    use_rslora=[False],
    lora_bias=[False],
    modules_to_save=[None, []],
    rank_pattern=[{}, None],
    alpha_pattern=[{}, None],
    layers_to_transform=[None],
    trainable_token_indices=[None],
)
# Files that say where text ends and how chats are written. A checkpoint keeps their text,
# since an export needs them again.
KEPT = ("config.json", "generation_config.json", *BESIDE)
WEIGHTS = r"(model|adapter_).*\.safetensors(\.index\.json)?|adapter_config\.json"


# ---------- in ----------------------------------------------------------------


def open_pretrained(name, key="init_from"):
    """The Source of a local directory or of a model on the hub ('gpt2', 'org/model').
    SystemExit if it is neither, or if none of our models computes the same.
    key: where the name comes from, for errors."""
    safe_open = package("safetensors", f"{key}={name}").safe_open
    files = ("model*.safetensors*", "adapter_*", TOKENIZER, *KEPT)
    path = Path(local_copy(key, name, *files))
    if (path / "adapter_config.json").exists():
        return open_adapter(path, safe_open)
    places = {}  # {our key: (file, their key)}
    shapes = {}  # {our key: shape}
    try:
        theirs = json.loads((path / "config.json").read_text("utf-8"))
        model, sizes = understand(theirs)
        sizes = asdict(model_file(model).ModelConfig(**sizes))
        for file in weight_files(path):
            with safe_open(file, "pt") as opened:
                for key in opened.keys():
                    if key.endswith(BUFFERS):
                        continue
                    ours = f"model.{key}"
                    if model == "gpt2" and key != "lm_head.weight":
                        # On the hub some files lack the prefix.
                        ours = "model.transformer." + key.removeprefix("transformer.")
                    shape = tuple(opened.get_slice(key).get_shape())
                    places[ours] = (file, key)
                    shapes[ours] = shape[::-1] if key.endswith(TRANSPOSED) else shape
    except Exception as e:
        raise SystemExit(
            f"{path}: cannot be read as a Hugging Face model, config.json and *.safetensors "
            f"({type(e).__name__}: {first_line(e)})")

    def get(ours):
        """A view of the mapped file, in the file's type."""
        file, key = places[ours]
        tensor = safe_open(file, "pt").get_tensor(key)
        return tensor.t() if key.endswith(TRANSPOSED) else tensor

    kept = [path / file for file in KEPT if (path / file).exists()]
    header = dict(
        iter_num=0,
        best_val_loss=1e9,
        model_args=sizes,
        config={"model": model},
        scaler=None,
        kept={file.name: file.read_text("utf-8") for file in kept},
    )
    return Source(str(path), header, shapes, get)


def weight_files(path):
    """The files with a model's weights, as transformers chooses them: model.safetensors, else
    those that the index names, since an older save's shards may lie there too. All shards only
    if there is neither."""
    whole = path / "model.safetensors"
    index = path / "model.safetensors.index.json"
    if whole.exists():
        return [whole]
    if index.exists():
        names = json.loads(index.read_text("utf-8"))["weight_map"].values()
        return sorted({path / os.path.basename(name) for name in names})
    return sorted(path.glob("model-*-of-*.safetensors")) or [whole]


def open_adapter(path, safe_open):
    """The Source of a directory that peft's save_pretrained has written. Its base, which it
    names, is opened too, for the sizes."""
    file = path / "adapter_model.safetensors"
    places = {}  # {our key: their key}
    shapes = {}  # {our key: shape}
    try:
        theirs = json.loads((path / "adapter_config.json").read_text("utf-8"))
        for key, values in PEFT.items():
            if theirs.get(key, values[0]) not in values:
                raise ValueError(f"{key}={theirs[key]!r}, but we compute only {values[0]!r}")
        with safe_open(file, "pt") as opened:
            for key in opened.keys():
                if not re.search(r"\.\d+\..*\.lora_[AB]\.weight$", key):
                    raise ValueError(f"{key}: we adapt only linear layers of blocks")
                name = key.removeprefix("base_model.model.").removesuffix(".weight")
                places[f"model.{name}"] = key
                shapes[f"model.{name}"] = tuple(opened.get_slice(key).get_shape())
        base = theirs["base_model_name_or_path"]
        if not base:
            raise ValueError("base_model_name_or_path is empty: write the base's name there")
        lora = dict(
            lora_rank=theirs["r"],
            lora_alpha=float(theirs["lora_alpha"]),
            lora_targets=rf"\.({'|'.join(layers_of(shapes))})$",
        )
    except Exception as e:
        raise SystemExit(
            f"{path}: cannot be read as peft's adapters, adapter_config.json and {file.name} "
            f"({type(e).__name__}: {first_line(e)})")

    def get(ours):
        return safe_open(file, "pt").get_tensor(places[ours])

    header = open_pretrained(base, f"{path}: base_model_name_or_path").header
    header["model_args"].update(lora, base=base)
    header["config"]["model"] += "+lora"
    return Source(str(path), header, shapes, get)


def layers_of(shapes):
    """The names, within a block, of the layers that have adapters."""
    names = {key.rpartition(".lora_")[0] for key in shapes if ".lora_" in key}
    return sorted({re.split(r"\.\d+\.", name, maxsplit=1)[-1] for name in names})


def understand(theirs):
    """(our model, its sizes) of a config.json; ValueError if none of our models computes it."""
    kind = theirs.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"model_type={kind!r} is none of {', '.join(ARCHITECTURES)}")
    model = ARCHITECTURES[kind]["model"]
    keys = ARCHITECTURES[kind]["keys"]
    fixed = dict(ARCHITECTURES[kind]["fixed"])
    said = {key: value for key, value in theirs.items() if value is not None}
    sizes = {ours: said[key] for ours, key in keys.items() if key in said}
    if model == "gpt2":
        sizes["bias"] = True
        fixed["n_inner"] = [None, 4 * sizes["n_embd"]]
    else:
        sizes["rope_theta"], sizes["rope_factor"] = rotary(theirs)
        sizes["qk_norm"] = kind == "qwen3"
        sizes.setdefault("n_kv_head", sizes["n_head"])
        sizes.setdefault("tie_embeddings", False)
        if sizes.get("head_dim") == sizes["n_embd"] // sizes["n_head"]:
            sizes["head_dim"] = 0  # our key for that case
    for key, values in fixed.items():
        if theirs.get(key, values[0]) not in values:
            raise ValueError(
                f"{key}={theirs[key]!r}, but {model} computes only {values[0]!r}")
    return model, sizes


def rotary(theirs):
    """(base, factor) of Llama's rotary positions."""
    rope = {
        "rope_type": "default",
        "rope_theta": theirs.get("rope_theta") or 1e4,
        **(theirs.get("rope_scaling") or {}),
        **(theirs.get("rope_parameters") or {}),  # since transformers 5: both in one
    }
    if rope.items() >= LLAMA3_SCALING.items():
        return rope["rope_theta"], rope["factor"]
    if {rope["rope_type"], rope.get("type", "default")} != {"default"}:
        raise ValueError(
            f"rotary positions {rope}, but llama computes only Llama 3's scaling")
    return rope["rope_theta"], 1.0


# ---------- out ---------------------------------------------------------------


def export(source, path, dtype="float32"):
    """Write a directory that transformers opens, with equal logits. It takes host memory
    for the whole model."""
    if is_lora(source):
        source = merged(source)
    config = their_config(source, dtype)
    tensors = their_tensors(source, config["tie_word_embeddings"], DTYPES[dtype])
    save = package("safetensors.torch", "a Hugging Face directory").save
    kept = source.header.get("kept") or {}
    files = {file: kept[file].encode() for file in KEPT if file in kept}
    files["config.json"] = json.dumps(config, indent=2).encode()
    files["model.safetensors"] = save(tensors, {"format": "pt"})
    tokenizer, end = their_tokenizer(source)
    files.update(tokenizer)
    if end is not None:
        for file in ("config.json", "generation_config.json"):
            if file in files:
                files[file] = with_end(files[file], end)
    write_directory(path, files)


def is_lora(source):
    return source.header["config"]["model"].endswith("+lora")


def merged(source):
    """The Source of the whole model: the weights of the base with the adapters added."""
    sizes = source.header["model_args"]
    config = source.header["config"]
    cfg = make_config({"model": config["model"], **sizes})
    base = with_own_files(cfg, True, World()).sizes.opened
    scale = sizes["lora_alpha"] / sizes["lora_rank"]

    def get(key):
        weight = base.whole(key)
        layer = key.removesuffix(".weight")
        if f"{layer}.lora_A" not in source.shapes:
            return weight
        product = source.whole(f"{layer}.lora_B") @ source.whole(f"{layer}.lora_A")
        return weight.float() + scale * product

    header = dict(source.header, kept=base.header.get("kept"))
    header["config"] = {**config, "model": config["model"].removesuffix("+lora")}
    return replace(base, header=header, get=get)


def export_adapter(source, path):
    """Write a directory that peft's PeftModel.from_pretrained opens."""
    if not is_lora(source):
        raise SystemExit(f"{source.path} has no adapters: leave out --adapter")
    save = package("safetensors.torch", "a Hugging Face directory").save
    sizes = source.header["model_args"]
    tensors = {}
    for key in source.shapes:
        state, _, name = key.partition(".")
        if state == "model":
            tensors[f"base_model.model.{name}.weight"] = source.whole(key)
    # In a list peft looks for whole names and for their ends.
    layers = {name.rpartition(".lora_")[0] for name in tensors}
    config = dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path=sizes["base"],
        r=sizes["lora_rank"],
        lora_alpha=sizes["lora_alpha"],
        lora_dropout=0.0,
        bias="none",
        target_modules=sorted(layer.removeprefix("base_model.model.") for layer in layers),
        fan_in_fan_out=source.header["config"]["model"] == "gpt2+lora",
        inference_mode=True,
    )
    files, _ = their_tokenizer(source)
    files["adapter_config.json"] = json.dumps(config, indent=2).encode()
    files["adapter_model.safetensors"] = save(tensors, {"format": "pt"})
    write_directory(path, files)


def write_directory(path, files):
    """Write {file: content}. SystemExit if other weights are there, which a program might read
    instead, or if the disk refuses."""
    try:
        os.makedirs(path, exist_ok=True)
        others = {file for file in os.listdir(path) if re.fullmatch(WEIGHTS, file)} - set(files)
        if others:
            raise SystemExit(
                f"{path}: other weights are here ({', '.join(sorted(others)[:3])}); move them "
                "away, or pass another directory")
        write_files(path, {file: [content] for file, content in files.items()})
    except OSError as e:
        raise SystemExit(cannot_write(path, e))


def their_config(source, dtype):
    """config.json for a checkpoint. SystemExit if its model has no Hugging Face format."""
    sizes = source.header["model_args"]
    model = source.header["config"]["model"]
    kind = "qwen3" if sizes.get("qk_norm") else model
    if kind not in ARCHITECTURES:
        raise SystemExit(
            f"{source.path} holds model={model}, which has no Hugging Face format")
    keys = ARCHITECTURES[kind]["keys"]
    fixed = ARCHITECTURES[kind]["fixed"]
    config = {key: values[0] for key, values in fixed.items() if values[0] is not None}
    config.update({key: sizes[ours] for ours, key in keys.items()})
    config["model_type"] = kind
    config["architectures"] = [ARCHITECTURES[kind]["name"]]
    config["dtype"] = dtype
    # If training began with a released model, its config says where text ends.
    kept = source.header.get("kept") or {}
    origin = {"bos_token_id": None, "eos_token_id": None}
    if "config.json" in kept:
        origin = json.loads(kept["config.json"])
    config.update({key: origin[key] for key in origin if key.endswith("_token_id")})
    if model == "gpt2":
        dropouts = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
        config.update(dict.fromkeys(dropouts, sizes["dropout"]))
    else:
        # Rotary positions have no table: a run with a shorter context does not shorten them.
        longest = origin.get("max_position_embeddings") or 0
        config["max_position_embeddings"] = max(sizes["block_size"], longest)
        config["head_dim"] = sizes["head_dim"] or sizes["n_embd"] // sizes["n_head"]
        if sizes["rope_factor"] > 1:
            config["rope_scaling"] = dict(LLAMA3_SCALING, factor=sizes["rope_factor"])
    return config


def their_tensors(source, tied, dtype):
    """{their name: tensor} of a checkpoint's weights."""
    # Their GPT-2 has biases everywhere, ours may have none.
    adds_biases = not source.header["model_args"].get("bias", True)
    tensors = {}
    for key, shape in source.shapes.items():
        state, _, name = key.partition(".")
        if state != "model" or (tied and name == "lm_head.weight"):
            continue  # the optimizer's; or a second name, which transformers adds itself
        tensor = source.whole(key).to(dtype)
        tensors[name] = tensor.t().contiguous() if name.endswith(TRANSPOSED) else tensor
        is_embedding = name.endswith(("wte.weight", "wpe.weight"))
        if adds_biases and not is_embedding:
            tensors[name.replace("weight", "bias")] = torch.zeros(shape[0], dtype=dtype)
    return tensors


# ---------- their tokenizer ---------------------------------------------------


def their_tokenizer(source):
    """({file: content}, the token that ends a text or None) for the tokenizer of the run's
    data. If that has no Hugging Face format, a line says so."""
    data = data_dir(source.header["config"].get("dataset", ""))
    vocab_size = source.header["model_args"]["vocab_size"]
    meta = {"vocab_size": vocab_size, **(source.header.get("meta") or read_meta(data))}
    name = name_of(meta, data)
    try:
        if name == "gpt2":
            bpe = gpt2_bpe()
            tokens = [bpe.decode_single_token_bytes(i) for i in range(bpe.eot_token)]
            return byte_level(tokens, vocab_size)
        if name == "bytes":
            return byte_level([bytes([i]) for i in range(256)], vocab_size)
        if name == TOKENIZER:
            paths = [data / file for file in (TOKENIZER, *BESIDE)]
            files = {path.name: path.read_bytes() for path in paths if path.exists()}
            return files, encoder(str(data / TOKENIZER)).end
        reason = f"the data's is {name or 'not known'}, and has no Hugging Face format"
    except SystemExit as e:  # the weights are worth writing without it
        reason = e.code
    if "dataset" in source.header["config"]:
        print(f"without a tokenizer: {reason}")
    return {}, None


def byte_level(tokens, vocab_size):
    """The same for byte-level BPE. tokens: each token's bytes, by id; tokens of several bytes
    in the order in which they were merged. A text ends with the next id, if the model has it."""
    # GPT-2 writes a byte as a letter: itself if that can be printed, else one from 256 on.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain}
    letters.update({byte: chr(256 + i) for i, byte in enumerate(others)})

    def written(token):
        return "".join(letters[byte] for byte in token)

    ids = {token: i for i, token in enumerate(tokens)}
    merges = []
    for token in tokens:
        if len(token) > 1:
            merges.append([written(part) for part in merged_from(token, ids)])
    vocabulary = {written(token): i for token, i in ids.items()}
    split = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    tokenizer = dict(
        version="1.0",
        added_tokens=[],
        pre_tokenizer=split,
        decoder=split,
        model=dict(type="BPE", vocab=vocabulary, merges=merges),
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    end = None
    if len(tokens) < vocab_size:
        end = len(tokens)
        token = dict(id=end, content="<|endoftext|>", special=True)
        token.update(dict.fromkeys(("normalized", "single_word", "lstrip", "rstrip"), False))
        tokenizer["added_tokens"].append(token)
        config.update(dict.fromkeys(("bos_token", "eos_token"), token["content"]))
    files = {TOKENIZER: tokenizer, "tokenizer_config.json": config}
    return {name: json.dumps(content).encode() for name, content in files.items()}, end


def merged_from(token, ids):
    """The two tokens whose merge makes this one: BPE, up to its last step."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [left + right for left, right in zip(parts, parts[1:])]
        first = min(range(len(pairs)), key=lambda i: ids.get(pairs[i], len(ids)))
        parts[first:first + 2] = [pairs[first]]
    return parts


def with_end(content, end):
    """A file of theirs, with this token among those that end a text. Chats may end with another
    token than the texts that the model was trained on before."""
    theirs = json.loads(content)
    ends = theirs.get("eos_token_id")
    if ends is None:
        ends = []
    elif not isinstance(ends, list):
        ends = [ends]
    if end in ends:
        return content
    theirs["eos_token_id"] = [end, *ends] if ends else end
    return json.dumps(theirs, indent=2).encode()


def main(argv):
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.error = sys.exit  # one line and exit code 1, as everywhere here
    parser.add_argument("out_dir", help="the run's directory")
    parser.add_argument("directory", help="the directory to write")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--adapter", action="store_true", help="write LoRA's alone, for peft")
    args = parser.parse_args(argv)
    source = open_source(Config(init_from="resume", out_dir=args.out_dir), World())
    if source is None:
        raise SystemExit(f"{args.out_dir}: no checkpoint there")
    if args.adapter:
        export_adapter(source, args.directory)
        print(f"{source.path} -> {args.directory}, for PeftModel.from_pretrained")
        return
    export(source, args.directory, args.dtype)
    print(f"{source.path} -> {args.directory}, for AutoModelForCausalLM.from_pretrained")


if __name__ == "__main__":
    run(main, sys.argv[1:])
