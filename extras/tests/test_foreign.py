"""
Models of transformers: two ranks are the same as one process. docs/your_model.md lists them.

    python -m pytest -q extras/tests/test_foreign.py
"""

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks, values

import fsdp
from compare import Compare

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

STEPS, MICRO_BATCHES = 4, 4
TEXT = dict(vocab_size=97, hidden_size=48, num_hidden_layers=2)
BLOCKS = dict(TEXT, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96)
TWICE = dict(TEXT, num_attention_heads=4, decoder_start_token_id=1)
IMAGES = dict(image_size=16, patch_size=4, num_channels=1)
NO_DROPOUT = dict(hidden_dropout_prob=0, attention_probs_dropout_prob=0, drop_path_rate=0)
SIZES = {  # model type: its config's values
    "gpt2": dict(BLOCKS, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
    "llama": BLOCKS,
    "mixtral": dict(BLOCKS, num_local_experts=4, output_router_logits=True),
    "mamba": dict(TEXT, state_size=8),
    "bert": dict(BLOCKS, **NO_DROPOUT),
    "t5": dict(TWICE, d_kv=12, d_ff=96, dropout_rate=0),
    "whisper": dict(TWICE, decoder_layers=2, num_mel_bins=8, max_source_positions=16,
                    pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "vit": dict(BLOCKS, **IMAGES, **NO_DROPOUT),
    "swin": dict(IMAGES, **NO_DROPOUT, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
                 window_size=2),
    "clip": dict(text_config=dict(BLOCKS, eos_token_id=2), vision_config=dict(BLOCKS, **IMAGES)),
}
FAMILIES = {  # model type: (class, the lists whose modules are the units)
    "gpt2": ("GPT2LMHeadModel", "transformer.h"),
    "llama": ("LlamaForCausalLM", "model.layers"),
    "mixtral": ("MixtralForCausalLM", "model.layers"),
    "mamba": ("MambaForCausalLM", "backbone.layers"),
    "bert": ("BertForMaskedLM", "bert.encoder.layer"),
    "t5": ("T5ForConditionalGeneration", "encoder.block decoder.block"),
    "whisper": ("WhisperForConditionalGeneration", "model.encoder.layers model.decoder.layers"),
    "vit": ("ViTForImageClassification", "vit.layers"),
    "swin": ("SwinForImageClassification",
             "swin.encoder.layers.0.blocks swin.encoder.layers.1.blocks"),
    "clip": ("CLIPModel", "text_model.encoder.layers vision_model.encoder.layers"),
}
RUNS = [f"{family} sharded" for family in FAMILIES]
RUNS += ["gpt2 ddp", "mixtral ddp", "clip ddp", "llama checkpointed", "t5 checkpointed"]


def micro_batch(family, step, i):
    """The i-th of a step, the same whichever rank computes it."""
    drawn = torch.Generator().manual_seed(100 * step + i)
    ids = torch.randint(3, 97, (2, 12), generator=drawn)
    numbers = torch.randn(2, 1, 16, 16, generator=drawn)
    if family == "whisper":
        return dict(input_features=numbers.reshape(2, 8, 32), labels=ids)
    if family in ("vit", "swin"):
        return dict(pixel_values=numbers, labels=ids[:, 0] % 2)
    if family == "clip":
        return dict(pixel_values=numbers, input_ids=ids, return_loss=True)
    return dict(input_ids=ids, labels=ids)


def train(run, path):
    """How many steps were compared. A family's first run makes its file."""
    torch.manual_seed(0)
    family, way = run.split()
    name, lists = FAMILIES[family]
    config = transformers.AutoConfig.for_model(family, **SIZES[family])
    model = getattr(transformers, name)(config)
    if family == "clip":  # FSDP2 takes no scalar parameter
        model.logit_scale = torch.nn.Parameter(model.logit_scale.detach().reshape(1))
    units = [unit for name in lists.split() for unit in model.get_submodule(name)]
    if way == "checkpointed":
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    rank, world = (0, 1) if way == "alone" else (dist.get_rank(), dist.get_world_size())
    wrapped = fsdp.replicate(model) if way == "ddp" else model
    if way in ("sharded", "checkpointed"):
        fsdp.shard(model, units, fsdp.make_mesh("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compare = Compare(path / family, model, {str(i): unit for i, unit in enumerate(units)})
    for step in range(STEPS):
        total = 0.0
        for i in range(rank, MICRO_BATCHES, world):
            fsdp.set_grad_sync(wrapped, is_last_micro_batch=i + world >= MICRO_BATCHES)
            loss = wrapped(**micro_batch(family, step, i)).loss * world / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        compare.step(step, optimizer, total)
        fsdp.clip_grad_norm(wrapped, 1.0)
        optimizer.step()
        fsdp.zero_grad(wrapped, optimizer)
    return len(compare.before)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("foreign")
    for family in FAMILIES:
        train(f"{family} alone", path)
    return on_ranks(2, {run: (train, dict(run=run, path=path)) for run in RUNS})


@pytest.mark.parametrize("run", RUNS)
def test_models_of_transformers_are_the_same_on_two_ranks(results, run):
    assert values(results, run) == [STEPS, STEPS]
