"""
GPT-2, Llama (1 to 3, TinyLlama, SmolLM2), Mistral without a window, Qwen2, 2.5 and 3 in Hugging
Face's format, in and out.

    python train.py extras/config/finetune_smollm2.py --init_from=HuggingFaceTB/SmolLM2-360M
    python train.py ... --init_from=DIR    # config.json, and model.safetensors or shards
    python -m extras.huggingface out-x DIR --dtype=bfloat16    # out-x's newest checkpoint
    python -m extras.huggingface out-lora DIR                  # merges LoRA's adapters
    python -m extras.huggingface out-lora DIR --adapter        # adapters only, in peft's layout

DIR must be new or empty. The export includes the data set's tokenizer.json with its chat template;
or GPT-2's, from the hub.
"""

import json
import os
import re
import sys
import zlib
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import asdict, replace
from pathlib import Path

import torch

# Started by its path, this file does not see the repository.
sys.path.insert(0, str(Path(__file__).absolute().parents[1]))
from checkpoint import Source, list_all
from configurator import DTYPES, Config, make_config, model_file
from data.files import write_files
from data.loader import data_dir, read_meta
from data.tokenizer import TOKENIZER, name_of
from extras.hf_tokenizer import BESIDE, encoder_of, local_copy, unknown_tokens
from extras.to_full import whole
from ranks import World, from_rank0, run
from start import open_start, require_same_tokens, with_base

# Buffers in other programs' files, which we skip: attention masks, rotary frequencies.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")

# ---------- their names and ours ----------------------------------------------


# keys: {our key: (theirs, what transformers takes if config.json lacks it)}.
# fixed: {their key: the values that our model computes}; values[0] is the default.
GPT2 = dict(
    name="GPT2LMHeadModel",  # transformers' class
    model="gpt2",  # our --model
    keys=dict(
        n_layer=("n_layer", 12),
        n_head=("n_head", 12),
        n_embd=("n_embd", 768),
        vocab_size=("vocab_size", 50257),
        block_size=("n_positions", 1024),
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
        n_layer=("num_hidden_layers", 32),
        n_head=("num_attention_heads", 32),
        n_kv_head=("num_key_value_heads", None),  # as many as n_head
        n_embd=("hidden_size", 4096),
        n_inner=("intermediate_size", 11008),
        head_dim=("head_dim", None),  # n_embd / n_head
        norm_eps=("rms_norm_eps", 1e-6),
        rope_theta=("rope_theta", 1e4),
        tie_embeddings=("tie_word_embeddings", False),
        vocab_size=("vocab_size", 32000),
        block_size=("max_position_embeddings", 2048),
    ),
    fixed=dict(
        hidden_act=["silu"],
        attention_bias=[False],
        mlp_bias=[False],
        quantization_config=[None],
    ),
)


def like(base, name, fixed, **new):
    """A kind of `base` that fixes other keys, and whose config.json has new defaults."""
    keys = {ours: (key, new.get(key, old)) for ours, (key, old) in base["keys"].items()}
    fixed = dict(hidden_act=["silu"], quantization_config=[None], **fixed)
    return dict(base, name=name, keys=keys, fixed=fixed)


MISTRAL = like(
    LLAMA, "MistralForCausalLM", dict(sliding_window=[None]), num_key_value_heads=8,
    intermediate_size=14336, max_position_embeddings=131072)
QWEN2 = like(
    LLAMA, "Qwen2ForCausalLM", dict(use_sliding_window=[False]), num_key_value_heads=32,
    intermediate_size=22016, max_position_embeddings=32768, vocab_size=151936)
QWEN3 = like(
    QWEN2, "Qwen3ForCausalLM", dict(use_sliding_window=[False], attention_bias=[False]),
    head_dim=128)
# By their model_type.
ARCHITECTURES = dict(gpt2=GPT2, llama=LLAMA, mistral=MISTRAL, qwen2=QWEN2, qwen3=QWEN3)
OWN = dict(qk_norm="qwen3", qkv_bias="qwen2")  # {our key: the kind of Llama that has it}
# What the names in a file begin with, all but the head's; and our names of both tables.
BASES = dict(gpt2="transformer.", llama="model.")
EMBEDDINGS = dict(gpt2="model.transformer.wte.weight", llama="model.model.embed_tokens.weight")
HEAD = "model.lm_head.weight"
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
# What peft's adapter_config.json may turn on. Other ways to begin, such as PiSSA, change the base.
PEFT = dict(
    peft_type=["LORA"], bias=["none"], revision=["main"],
    init_lora_weights=[True, "gaussian", "eva", "orthogonal", "mica"])
# Its keys that we read, or that do not change what a trained adapter computes.
PEFT_OTHERS = (
    "base_model_name_or_path r lora_alpha lora_dropout target_modules exclude_modules task_type "
    "layers_pattern fan_in_fan_out inference_mode auto_mapping peft_version megatron_core "
    "eva_config qalora_group_size ensure_weight_tying").split()
GPT2_HUB = "openai-community/gpt2"
# Files that say where text ends and how chats are written. A checkpoint keeps their text,
# since an export needs them again.
KEPT = ("config.json", "generation_config.json", *BESIDE)


# ---------- in ----------------------------------------------------------------


def open_weights(name, world, dataset=None):
    """The Source for a run's start (all ranks). SystemExit if the data set has another tokenizer.
    Rank 0 opens it first, so that one rank downloads. Then each does, since a node may have a cache
    of its own."""
    from_rank0(world, lambda: open_pretrained(name).path)
    source = open_pretrained(name)
    if dataset is not None:
        require_tokenizer(source, dataset)
    return source


def open_pretrained(name):
    """The Source of a local directory or of a model on the hub ('gpt2', 'org/model'): a model's, or
    that of peft's adapters. SystemExit if it is neither, or if none of our models computes the
    same."""
    files = ("model*.safetensors*", "adapter_*", TOKENIZER, *KEPT)
    path = Path(local_copy(name, *files))
    try:
        from safetensors import safe_open
        if (path / "adapter_config.json").exists():
            return open_adapter(path, safe_open)
        return open_model(path, safe_open)
    except Exception as e:
        raise SystemExit(
            f"{path}: cannot be read as a Hugging Face model, config.json and *.safetensors "
            f"({type(e).__name__}: {e})")


def open_model(path, safe_open):
    theirs = json.loads((path / "config.json").read_text("utf-8"))
    model, sizes = understand(theirs)
    sizes = asdict(model_file(model).ModelConfig(**sizes))
    places = {}  # {our key: (file, their key)}
    shapes = {}  # {our key: shape}

    def get(ours):
        """A view of the mapped file, in the file's type."""
        file, key = places[ours]
        tensor = safe_open(file, "pt").get_tensor(key)
        return tensor.t() if key.endswith(TRANSPOSED) else tensor

    for file in weight_files(path):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():
                ours = our_name(key, BASES[model])
                if ours.endswith(BUFFERS):
                    continue
                shape = tuple(opened.get_slice(key).get_shape())
                places[ours] = (file, key)
                shapes[ours] = shape[::-1] if key.endswith(TRANSPOSED) else shape

    embedding = EMBEDDINGS[model]
    if sizes.get("tie_embeddings", True) and HEAD in places:  # GPT-2's are always tied
        if embedding not in places:
            places[embedding] = places.pop(HEAD)
            shapes[embedding] = shapes.pop(HEAD)
        elif not torch.equal(get(HEAD), get(embedding)):
            if model == "gpt2":
                raise ValueError("lm_head and wte differ, but gpt2 has one table for both")
            sizes["tie_embeddings"] = False  # as transformers does then

    kept = [path / file for file in KEPT if (path / file).exists()]
    header = dict(
        origin=f"a model whose weights have the CRC {crc_of_samples(weight_files(path))}",
        iter_num=0,
        best_val_loss=1e9,
        model_args=sizes,
        config={"model": model},
        scaler=None,
        kept={file.name: file.read_text("utf-8") for file in kept},
    )
    return Source(str(path), header, shapes, get)


def crc_of_samples(files):
    """Of a KiB in every 4 MiB and the last one, since to read all would take minutes. Another
    fine-tune has other numbers there, and adapters merged into matrices of 4 MiB or more."""
    crc = 0
    for file in files:
        with open(file, "rb") as f:
            size = os.path.getsize(file)
            for start in (*range(0, size, 2**22), max(0, size - 2**10)):
                f.seek(start)
                crc = zlib.crc32(f.read(2**10), crc)
    return crc


def our_name(key, base):
    """Our name of their tensor. A model that was saved without its head has names without the base,
    and one that another holds as its .model has it twice."""
    name = key.removeprefix(base).removeprefix(base)
    return HEAD if name == "lm_head.weight" else f"model.{base}{name}"


def weight_files(path):
    """The files with a model's weights, as transformers chooses them: model.safetensors, else
    those that the index names, since an older save's shards may lie there too."""
    whole = path / "model.safetensors"
    index = path / "model.safetensors.index.json"
    if whole.exists() or not index.exists():
        return [whole]
    names = json.loads(index.read_text("utf-8"))["weight_map"].values()
    return sorted({path / os.path.basename(name) for name in names})


def open_adapter(path, safe_open):
    """Of a directory that peft's save_pretrained has written. Its base, which it names, is opened
    too, for the sizes."""
    theirs = json.loads((path / "adapter_config.json").read_text("utf-8"))
    for key, value in theirs.items():
        if value and key not in PEFT_OTHERS and value not in PEFT.get(key, ()):
            raise ValueError(
                f"{key}={value!r} is more than plain LoRA: merge it into its base with "
                "peft's merge_and_unload()")
    file = path / "adapter_model.safetensors"
    places = {}  # {our key: their key}
    shapes = {}  # {our key: shape}
    layers = set()  # their names within a block
    with safe_open(file, "pt") as opened:
        for key in opened.keys():
            found = re.search(r"\.\d+\.(.*)\.lora_[AB]\.weight$", key)
            if not found:
                raise ValueError(f"{key}: we adapt only linear layers of blocks")
            layers.add(found[1])
            name = key.removeprefix("base_model.model.").removesuffix(".weight")
            places[f"model.{name}"] = key
            shapes[f"model.{name}"] = tuple(opened.get_slice(key).get_shape())

    def get(ours):
        return safe_open(file, "pt").get_tensor(places[ours])

    base = theirs["base_model_name_or_path"] or ""
    header = open_pretrained(base).header
    header["model_args"].update(
        base=base,
        lora_rank=theirs["r"],
        lora_alpha=float(theirs["lora_alpha"]),
        lora_targets=rf"\.({'|'.join(sorted(layers))})$",
    )
    header["config"]["model"] += "+lora"
    return Source(str(path), header, shapes, get)


def understand(theirs):
    """(our model, its sizes) of a config.json; ValueError if none of our models computes it."""
    kind = theirs.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"model_type={kind!r} is none of {', '.join(ARCHITECTURES)}")
    model = ARCHITECTURES[kind]["model"]
    keys = ARCHITECTURES[kind]["keys"]
    fixed = dict(ARCHITECTURES[kind]["fixed"])
    said = {"sliding_window": 4096, **theirs}  # Mistral's default
    sizes = {ours: said.get(key, default) for ours, (key, default) in keys.items()}
    if model == "gpt2":
        sizes["bias"] = True
        fixed["n_inner"] = [None, 4 * sizes["n_embd"]]
    else:
        sizes["rope_theta"], sizes["rope_factor"] = rotary(said)
        sizes.update({key: kind == other for key, other in OWN.items()})
        sizes["n_kv_head"] = sizes["n_kv_head"] or sizes["n_head"]
        if sizes["head_dim"] in (None, sizes["n_embd"] // sizes["n_head"]):
            sizes["head_dim"] = 0  # our key for that case
        # A window as long as the context hides nothing.
        if (said["sliding_window"] or 0) >= sizes["block_size"]:
            fixed.pop("sliding_window", None)
    for key, values in fixed.items():
        if said.get(key, values[0]) not in values:
            raise ValueError(
                f"{key}={said[key]!r}, but {model} computes only {values[0]!r}")
    return model, sizes


def rotary(said):
    """(base, factor) of Llama's rotary positions."""
    # Since transformers 5 both are in rope_parameters, but rope_scaling comes first.
    rope = dict(said.get("rope_scaling") or said.get("rope_parameters") or {})
    rope.setdefault("rope_theta", said.get("rope_theta", 1e4))
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.update({key: said[key] for key in LLAMA3_SCALING if key in said})
    if rope.items() >= LLAMA3_SCALING.items():
        return rope["rope_theta"], rope["factor"]
    if rope["rope_type"] != "default":
        raise ValueError(
            f"rotary positions {rope}, but llama computes only Llama 3's scaling")
    return rope["rope_theta"], 1.0


def require_tokenizer(model, dataset):
    """SystemExit if the data has another tokenizer than the model, a Source: more than a tenth of
    the ids that both have are of other tokens. A base and its chat model differ in fewer. (A
    refusal, since only who replaces a vocabulary on purpose can mean it.)"""
    data = data_dir(dataset)
    meta = {"vocab_size": 0, **read_meta(data)}
    name = name_of(meta, data)
    # Of these a few tokens are enough.
    known = dict(bytes={97: "a"}, gpt2={64: "a", 262: "\u0120the", 10000: "\u0120pocket"})
    ours = known.get(name) or dict(enumerate(meta.get("chars", ()))) or tokens_of(data)
    theirs = tokens_of(model.path)
    both = ours.keys() & theirs.keys()
    if sum(ours[i] == theirs[i] for i in both) < 0.9 * len(both):
        raise SystemExit(
            f"dataset={dataset} has another tokenizer, {name}, than {model.path}: prepare it "
            f"with --tokenizer={model.path}, or if you mean it, pass a copy without {TOKENIZER}")


def tokens_of(directory):
    """{id: token} of the directory's tokenizer.json, read as JSON: training needs no library. {}
    if there is none."""
    path = Path(directory, TOKENIZER)
    if not path.exists():
        return {}
    vocab = json.loads(path.read_text("utf-8"))["model"]["vocab"]
    if isinstance(vocab, list):  # Unigram's: [token, score]
        vocab = {token: i for i, (token, _) in enumerate(vocab)}
    return {i: token for token, i in vocab.items()}


# ---------- out ---------------------------------------------------------------


def export(source, path, dtype="float32"):
    """Write a directory that transformers opens, with equal logits. It takes host memory
    for the whole model."""
    require_empty(path)
    if is_lora(source):
        source = merged(source)
    config = their_config(source, dtype)
    tensors = their_tensors(source, config["tie_word_embeddings"], DTYPES[dtype])
    from safetensors.torch import save
    kept = source.header.get("kept") or {}
    files = {"model.safetensors": save(tensors, {"format": "pt"})}  # first: the disk may be full
    tokenizer, end = their_tokenizer(source)
    files.update(tokenizer)
    texts = {**kept, "config.json": json.dumps(config, indent=2)}
    for file in ("config.json", "generation_config.json"):
        if file in texts:
            files[file] = with_end(texts[file], end).encode()
    write_directory(path, files)


def is_lora(source):
    return source.header["config"]["model"].endswith("+lora")


def merged(source):
    """The Source of the whole model: the weights of the base with the adapters added."""
    sizes = source.header["model_args"]
    config = source.header["config"]
    cfg = make_config({"model": config["model"], **sizes})
    base = with_base(cfg, World(), resumed=True).sizes.opened
    scale = sizes["lora_alpha"] / sizes["lora_rank"]
    if cfg.sizes.base_bits:
        print("adding to the base as it was, not to its 4 bits: the loss may differ a little")

    def get(key):
        weight = whole(base, key)
        layer = key.removesuffix(".weight")
        if f"{layer}.lora_A" not in source.shapes:
            return weight
        product = whole(source, f"{layer}.lora_B") @ whole(source, f"{layer}.lora_A")
        return weight.float() + scale * product

    header = dict(source.header, kept=base.header.get("kept"))
    header["config"] = {**config, "model": config["model"].removesuffix("+lora")}
    # The table of positions is the base's too: all of it, though LoRA's run may have used less.
    header["model_args"] = {**sizes, "block_size": base.header["model_args"]["block_size"]}
    return replace(base, header=header, get=get)


def export_adapter(source, path):
    """Write a directory that peft's PeftModel.from_pretrained opens."""
    require_empty(path)
    if not is_lora(source):
        raise SystemExit(f"{source.path} has no adapters: leave out --adapter")
    from safetensors.torch import save
    sizes = source.header["model_args"]
    base = sizes["base"]
    if list_all(base):
        raise SystemExit(
            f"base={base} is a run of ours, which peft cannot open: write it with "
            f"`python -m extras.huggingface {base} DIR`, and pass --base=DIR; or leave out "
            "--adapter")
    tensors = {}
    for key in source.shapes:
        state, _, name = key.partition(".")
        if state == "model":
            tensors[f"base_model.model.{name}.weight"] = whole(source, key)
    # In a list peft looks for whole names and for their ends.
    layers = {name.rpartition(".lora_")[0] for name in tensors}
    config = dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
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


def require_empty(path):
    """SystemExit if the directory has files. They might be the model's that the run began from, or
    other weights, which a program might read instead of ours."""
    if os.path.exists(path) and (there := sorted(os.listdir(path))):
        raise SystemExit(
            f"{path}: files are here ({', '.join(there[:3])}); move them away, or pass another "
            "directory")


def write_directory(path, files):
    """Write {file: content} into an empty directory."""
    os.makedirs(path, exist_ok=True)
    write_files(path, {file: [content] for file, content in files.items()})


def their_config(source, dtype):
    """config.json for a checkpoint. SystemExit if its model has no Hugging Face format."""
    sizes = source.header["model_args"]
    model = source.header["config"]["model"]
    # If training began with a released model, its config says which kind, and where text ends.
    kept = source.header.get("kept") or {}
    origin = {"bos_token_id": None, "eos_token_id": None}
    if "config.json" in kept:
        origin = json.loads(kept["config.json"])
    kinds = [kind for key, kind in OWN.items() if sizes.get(key)] or [model]
    if len(kinds) > 1 or model not in BASES:
        raise SystemExit(
            f"{source.path} holds model={model}: Hugging Face has no format for it, or none for "
            f"{' with '.join(OWN)}")
    is_mistral = kinds == ["llama"] and origin.get("model_type") == "mistral"
    kind = "mistral" if is_mistral else kinds[0]
    keys = ARCHITECTURES[kind]["keys"]
    fixed = ARCHITECTURES[kind]["fixed"]
    config = {key: values[0] for key, values in fixed.items() if key != "quantization_config"}
    config.update({key: sizes[ours] for ours, (key, _) in keys.items()})
    config["model_type"] = kind
    config["architectures"] = [ARCHITECTURES[kind]["name"]]
    config["dtype"] = dtype
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
        tensor = whole(source, key).to(dtype)
        tensors[name] = tensor.t().contiguous() if name.endswith(TRANSPOSED) else tensor
        is_embedding = name.endswith(("wte.weight", "wpe.weight"))
        if adds_biases and not is_embedding:
            tensors[name.replace("weight", "bias")] = torch.zeros(shape[0], dtype=dtype)
    return tensors


# ---------- their tokenizer ---------------------------------------------------


def their_tokenizer(source):
    """({file: content}, the token that ends a text or None) for the tokenizer of the run's
    data. If it has no such files, a line says so."""
    data = data_dir(source.header["config"].get("dataset", ""))
    vocab_size = source.header["model_args"]["vocab_size"]
    meta = {"vocab_size": vocab_size, **(source.header.get("meta") or read_meta(data))}
    name = name_of(meta, data)
    require_same_tokens(source, data)
    if name not in ("gpt2", TOKENIZER):
        print(f"without a tokenizer: the data's is {name or 'not known'}")
        return {}, None
    try:
        own = encoder_of(GPT2_HUB if name == "gpt2" else str(data), needs_end=False)
    except SystemExit as e:  # the weights are worth writing without it
        print(f"without a tokenizer: {e.code}")
        return {}, None
    files = with_kept(own.files, source.header.get("kept") or {})
    config = json.loads(files["tokenizer_config.json"])
    # The class that takes tokenizer.json as it is. GPT2Tokenizer, say, which is also the default of
    # its kind of model, would split text by a pattern of its own.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if name == "gpt2":
        config["eos_token"] = "<|endoftext|>"
    files["tokenizer_config.json"] = json.dumps(config, indent=2).encode()
    return files, own.end


def with_kept(files, kept):
    """A data set's files with what they lack from the model that the run began from, unless that
    names other tokens. kept: that model's, {name: text}."""
    name = "tokenizer_config.json"
    config = json.loads(files.get(name, "{}"))
    more = {file: kept[file].encode() for file in BESIDE if file in kept}
    if "chat_template" in config:  # transformers would prefer the other file
        more.pop("chat_template.jinja", None)
    both = {**json.loads(more.get(name, "{}")), **config}
    result = {**more, **files, name: json.dumps(both).encode()}
    return {name: b"{}", **files} if unknown_tokens(result) else result


def with_end(text, end):
    """A file of theirs, with this token among those that end a text. Chats may end with another
    token than the texts that the model was trained on before."""
    theirs = json.loads(text)
    ends = theirs.get("eos_token_id")
    if ends is None:
        ends = []
    elif not isinstance(ends, list):
        ends = [ends]
    if end is None or end in ends:
        return text
    theirs["eos_token_id"] = [end, *ends] if ends else end
    return json.dumps(theirs, indent=2)


def main(argv):
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.error = sys.exit  # one line and exit code 1, as everywhere here
    parser.add_argument("out_dir", help="the run's directory")
    parser.add_argument("directory", help="the directory to write")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--adapter", action="store_true", help="write LoRA's alone, for peft")
    parser.add_argument("--base", help="LoRA's base, if it is elsewhere now")
    args = parser.parse_args(argv)
    source, _ = open_start(Config(init_from="resume", out_dir=args.out_dir), World())
    config = source.header["config"]
    config["model"] = config["model"].removesuffix("+float8")  # its weights are plain
    if args.base:
        source.header["model_args"]["base"] = args.base
    if args.adapter:
        export_adapter(source, args.directory)
        print(f"{source.path} -> {args.directory}, for PeftModel.from_pretrained")
        return
    export(source, args.directory, args.dtype)
    print(f"{source.path} -> {args.directory}, for AutoModelForCausalLM.from_pretrained")


if __name__ == "__main__":
    run(main, sys.argv[1:])
