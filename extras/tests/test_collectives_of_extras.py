"""
The paths of extras/ that communicate, under PyTorch's own comparison, as test_collectives.py says.

    pip install transformers torchao && \
        python -m pytest -q extras/tests/test_collectives_of_extras.py
"""

import importlib.util
import os

import pytest
from test_collectives import SHARDED, ZERO3, case, require_same

LORA = dict(model="gpt2+lora", lora_rank=4, lora_alpha=6.0)


@pytest.mark.slow
def test_collectives_of_extras_are_the_same_on_all_ranks(tmp, tmp_path, monkeypatch):
    base = os.path.join(tmp, "detail-base")
    two = dict(
        base=case(tmp, "base", **ZERO3),
        lora=case(tmp, "lora", **LORA, base=base, **ZERO3),
        from_lora=case(tmp, "lora", init_from="resume", max_iters=4, **LORA, **SHARDED),
        muon=case(tmp, "muon", optimizer="muon", **SHARDED),
        from_muon=case(tmp, "muon", init_from="resume", max_iters=4, optimizer="muon", **ZERO3),
        moe=case(tmp, "moe", model="moe", optimizer="muon", **ZERO3),
        llama=case(tmp, "llama", model="llama", n_kv_head=1, **ZERO3),
    )
    if importlib.util.find_spec("transformers"):
        from test_huggingface import case_gpt2, make_hf  # only here: it needs transformers

        make_hf(tmp_path / "hf", "gpt2")
        two["huggingface"] = case_gpt2, dict(path=str(tmp_path / "hf"), **ZERO3)
    if importlib.util.find_spec("torchao"):
        two["float8"] = case(tmp, "float8", dtype="float8", n_embd=48, **SHARDED)
    hybrid = dict(strategy="hybrid_shard", shard_group_size=2, optimizer="muon")
    require_same(monkeypatch, {2: two, 4: dict(hybrid=case(tmp, "hybrid-muon", **hybrid))})
