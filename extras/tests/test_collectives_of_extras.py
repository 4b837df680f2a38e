"""
The paths of extras/ that communicate, under PyTorch's own comparison, as test_collectives.py says.

    pip install transformers torchao && \
        python -m pytest -q extras/tests/test_collectives_of_extras.py
"""

import importlib.util
import os

import pytest
import torch
from test_collectives import SHARDED, ZERO3, case, require_same

LORA = dict(model="gpt2+lora", lora_rank=4, lora_alpha=6.0)


def case_gpt2(path):
    """Its files are transposed, and each rank takes its rows of them."""
    from test_huggingface import loaded, open_pretrained  # only here: it needs transformers

    wrapped = loaded(path, "--strategy=full_shard")
    get = open_pretrained(path).get
    for name, p in wrapped.named_parameters():
        assert torch.equal(p.full_tensor(), get(f"model.{name}")), name


@pytest.mark.slow
def test_collectives_of_extras_are_the_same_on_all_ranks(tmp, tmp_path, monkeypatch):
    base = os.path.join(tmp, "detail-base")
    two = dict(
        base=case(tmp, "base", **ZERO3),
        lora=case(tmp, "lora", **LORA, base=base, **ZERO3),
        from_lora=case(tmp, "lora", init_from="resume", max_iters=4, **LORA, **SHARDED),
        muon=case(tmp, "muon", optimizer="muon", **SHARDED),
        from_muon=case(tmp, "muon", init_from="resume", max_iters=4, optimizer="muon", **ZERO3),
        llama=case(tmp, "llama", model="llama", n_kv_head=1, **ZERO3),
    )
    if importlib.util.find_spec("transformers"):
        from test_huggingface import make_hf

        make_hf(tmp_path / "hf", "gpt2")
        two["huggingface"] = case_gpt2, dict(path=str(tmp_path / "hf"))
    if importlib.util.find_spec("torchao"):
        two["float8"] = case(tmp, "float8", dtype="float8", n_embd=48, **SHARDED)
    hybrid = dict(strategy="hybrid_shard", shard_group_size=2, optimizer="muon")
    require_same(monkeypatch, {2: two, 4: dict(hybrid=case(tmp, "hybrid-muon", **hybrid))})
