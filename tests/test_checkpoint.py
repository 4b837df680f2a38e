"""
checkpoint.py: what one run writes another reads, at any world size and strategy, bit for bit; and
what the files are. When and where a run saves: test_saves.py. Damage: test_damage.py.

    python -m pytest -q tests/test_checkpoint.py
"""

import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import training
from harness import on_ranks, refused, values
from saver import assert_equal, claimed, found, resumed, save
from torch.distributed import checkpoint as dcp
from training import arguments, built, launch, losses, read_ckpt, read_metrics, steps, tensor_of

import checkpoint
import train
from model import GPT, GPTConfig

FREEZE = r"wte|h\.0\.(ln_1|mlp)"  # parts of units: frozen and trained parameters are mixed


def made_full(sharded, out):
    """The newest one there as a ckpt.pt in out; its content."""
    source = found(sharded)
    flat = {key: tensor_of(source, key) for key in source.shapes}
    out.mkdir(exist_ok=True)
    checkpoint.write_ckpt_pt(out / "ckpt.pt", flat, source.header)
    return read_ckpt(out)


# -----------------------------------------------------------------------------
# resuming


def test_checkpoint_chain_across_world_sizes_and_strategies(tmp):
    """Every strategy, both kinds, offloaded on the way: the losses of one uninterrupted run."""
    whole, chain = os.path.join(tmp, "whole"), os.path.join(tmp, "chain")
    launch(1, arguments(tmp, whole, max_iters=12))
    for i, (world, strategy, kind, more) in enumerate((
            (2, "full_shard", "full", {}),
            (3, "shard_grad_op", "sharded", dict(cpu_offload=0.5)),
            (1, "", "full", {}),
            (4, "hybrid_shard", "sharded", dict(shard_group_size=2)),
            (2, "ddp", "sharded", {}),
            (2, "full_shard", "full", {}))):
        run = dict(strategy=strategy, checkpoint=kind, init_from="auto", **more)
        launch(world, arguments(tmp, chain, max_iters=2 * (i + 1), **run))
    assert losses(chain) == pytest.approx(losses(whole), rel=1e-5)
    training.assert_same_weights(read_ckpt(chain)["model"], read_ckpt(whole)["model"], 1e-4)
    assert {row["run"] for row in read_metrics(chain)} == {found(chain).header["run"]}  # one run


@pytest.mark.parametrize("world, kind", [(1, "full"), (2, "sharded")])
def test_checkpoint_resume_is_bitwise(tmp, world, kind):
    """12 = 6 + 6 steps, with dropout, evaluation at another interval."""
    whole, parts = (os.path.join(tmp, f"resume-{world}-{kind}-{name}")
                    for name in ("whole", "parts"))
    run = dict(checkpoint=kind, gradient_accumulation_steps=2, dropout=0.1)
    launch(world, arguments(tmp, whole, max_iters=12, eval_interval=12, **run))
    launch(world, arguments(tmp, parts, max_iters=6, eval_interval=4, **run))
    run.update(init_from="resume")
    p = launch(world, arguments(tmp, parts, max_iters=12, eval_interval=5, **run))
    assert "at step 6" in p.stdout
    assert losses(parts) == losses(whole)
    ours, theirs = ({key: tensor_of(source, key) for key in source.shapes}
                    for source in map(found, (parts, whole)))
    assert_equal(ours, theirs)


@pytest.fixture(scope="module")
def sound(tmp):
    """A directory with sharded checkpoints of steps 2 and 4, by two ranks."""
    out = os.path.join(tmp, "sound")
    run = dict(max_iters=4, eval_interval=2, checkpoint="sharded", gradient_accumulation_steps=2)
    launch(2, arguments(tmp, out, **run))
    return out


def test_checkpoint_newest_of_all_kinds_is_resumed(sound, tmp_path):
    """A ckpt.pt, and sharded ones beside it."""
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    ckpt = made_full(sound, tmp_path / "other")
    for step, expected in ((1, "step-000000004"), (5, "ckpt.pt")):
        torch.save({**ckpt, "iter_num": step}, tmp_path / "ckpt.pt")
        assert found(tmp_path).path == str(tmp_path / expected)


def test_checkpoint_has_the_loss_scale_of_float16(tmp, tmp_path):
    """A resumed run goes on with it, and does not start over from 65,536."""
    out = str(tmp_path / "out")
    launch(1, arguments(tmp, out, max_iters=2, dtype="float16"))
    ckpt = read_ckpt(out)
    ckpt["scaler"] = dict(scale=128.0, _growth_tracker=70)
    torch.save(ckpt, f"{out}/ckpt.pt")
    run = dict(max_iters=3, dtype="float16", init_from="resume")
    launch(1, arguments(tmp, out, **run))
    scales = [row["loss_scale"] for row in read_metrics(out) if "loss" in row]
    assert scales[2] == 128.0
    assert read_ckpt(out)["scaler"] == dict(scale=128.0, _growth_tracker=71)


def test_checkpoint_of_all_is_resumed_where_some_are_frozen_now(tmp, sound):
    """What is frozen has no moments. What trains since has new ones: test_damage.py."""
    model, optimizer = resumed(tmp, sound, freeze=FREEZE)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert set(optimizer.state) == set(trained) and len(trained) < len([*model.parameters()])


def test_checkpoint_crops_a_table_of_positions_and_nothing_else(tmp, sound, tmp_path):
    """Its first rows, weights and moments. What else differs in rows is another model."""
    ckpt = made_full(sound, tmp_path / "out")
    table = ckpt["model"]["transformer.wpe.weight"]
    number = ckpt["param_names"].index("transformer.wpe.weight")
    moments = ckpt["optimizer"]["state"][number]["exp_avg"]
    assert len(table) == len(moments) == 16
    for out in (tmp_path / "out", sound):  # full, and sharded
        model, optimizer = resumed(tmp, out, block_size=8)
        assert torch.equal(model.transformer.wpe.weight, table[:8])
        state = optimizer.state[model.transformer.wpe.weight]
        assert torch.equal(state["exp_avg"], moments[:8])
        assert torch.equal(model.transformer.wte.weight, ckpt["model"]["transformer.wte.weight"])
    for name in ("transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"):
        longer = torch.cat((ckpt["model"][name], torch.zeros(8, 30)))
        weights = {**ckpt["model"], name: longer}
        torch.save({**ckpt, "model": weights}, tmp_path / "out/ckpt.pt")
        for block_size in (8, 16):
            line = refused(resumed, tmp, tmp_path / "out", block_size=block_size)
            assert name in line and "another model" in line


# -----------------------------------------------------------------------------
# what is in the files


def test_checkpoint_has_nanogpts_layout(tmp):
    out = os.path.join(tmp, "layout")
    launch(1, arguments(tmp, out, max_iters=2, bias=False))
    ckpt = read_ckpt(out)
    theirs = {"model", "optimizer", "model_args", "iter_num", "best_val_loss", "config"}
    assert theirs < ckpt.keys()
    assert ckpt["iter_num"] == 2 and ckpt["config"]["n_layer"] == 3
    assert ckpt["meta"] == {"vocab_size": 67}  # ours, for sample.py
    head, wte = ckpt["model"]["lm_head.weight"], ckpt["model"]["transformer.wte.weight"]
    assert head.data_ptr() == wte.data_ptr()  # tied: stored once
    # what nanoGPT does with it: strict load, an AdamW with its two groups, integer-indexed state
    model = GPT(GPTConfig(**ckpt["model_args"]))
    model.load_state_dict(ckpt["model"])
    params = list(model.parameters())
    matrices, vectors = [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors}])
    optimizer.load_state_dict(ckpt["optimizer"])
    assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in params)
    # and by whose name: theirs is the order of these groups
    names = {p: name for name, p in model.named_parameters()}
    assert ckpt["param_names"] == [names[p] for p in matrices + vectors]


def test_checkpoint_of_ours_keeps_names_that_nanogpts_lose(sound, tmp_path):
    """A model of one's own may have a parameter attn.bias, or a module called module."""
    ckpt = made_full(sound, tmp_path)
    own = {"module.a": torch.ones(1), "h.attn.bias": torch.ones(1)}
    torch.save({**ckpt, "model": {**ckpt["model"], **own}}, tmp_path / "ckpt.pt")
    assert {f"model.{name}" for name in own} <= found(tmp_path).shapes.keys()


def test_checkpoint_of_nanogpt_is_resumed(tmp):
    """Theirs: prefixes of DDP and compile, causal masks, no parameter names; optimizer included."""
    out, whole = os.path.join(tmp, "from-nanogpt"), os.path.join(tmp, "from-nanogpt-whole")
    launch(1, arguments(tmp, out, max_iters=3, bias=False))
    ckpt = read_ckpt(out)
    weights = {"module._orig_mod." + name: tensor for name, tensor in ckpt["model"].items()}
    name, tensor = weights.popitem()
    weights[name.replace("module._orig_mod.", "_orig_mod.module.")] = tensor  # compiled around DDP
    for i in range(3):
        weights[f"module._orig_mod.transformer.h.{i}.attn.bias"] = torch.ones(1, 1, 16, 16)
    theirs = {key: ckpt[key] for key in ("optimizer", "model_args", "iter_num", "config")}
    theirs["config"] = {"learning_rate": 1e-3, "a_key_of_theirs": 1}  # no model is named
    theirs.update(model=weights, best_val_loss=torch.tensor(9.0))
    torch.save(theirs, os.path.join(out, "ckpt.pt"))
    os.remove(os.path.join(out, "metrics.jsonl"))  # they write none
    launch(2, arguments(tmp, out, max_iters=6, bias=False, init_from="resume"))
    launch(1, arguments(tmp, whole, max_iters=6, bias=False))
    assert losses(out) == pytest.approx(losses(whole)[3:], rel=1e-5)
    assert read_ckpt(out)["run"]


def test_checkpoint_pieces_are_in_the_order_of_rows():
    """Hybrid sharding's later rank may have written the first rows."""
    results = [SimpleNamespace(
        index=SimpleNamespace(fqn="w", offset=(first, 0)),
        storage_data=SimpleNamespace(relative_path=file, offset=8, length=9))
        for first, file in ((3, "__1_0.distcp"), (0, "__2_0.distcp"))]
    pieces = [[0, "__2_0.distcp", 8, 9], [3, "__1_0.distcp", 8, 9]]
    assert checkpoint.places_of(results) == {"w": pieces}


def case_both_kinds(tmp, out):
    """The same state, saved full and sharded."""
    run = built(tmp, strategy="full_shard", freeze=FREEZE)
    steps(run)
    saver = claimed(run, f"{out}/direct")
    save(saver, run, 1)
    saver.finish()
    full = checkpoint.find(f"{out}/direct", run.world)
    saver.out_dir, saver.cfg = out, replace(run.cfg, checkpoint="sharded")
    for step in (0, 1):  # the second time with the plans of the first
        save(saver, run, step)
        saver.finish()
    for source in (full, checkpoint.find(out, run.world)):
        train.set_values(run.model, run.optimizer, source, run.cfg.seed, run.world)


def test_checkpoint_sharded_made_full_equals_the_full_one(tmp, tmp_path):
    values(on_ranks(2, {"both": (case_both_kinds, dict(tmp=tmp, out=str(tmp_path)))}), "both")
    ours, direct = made_full(tmp_path, tmp_path), read_ckpt(tmp_path / "direct")
    assert ours["iter_num"] == 1
    for group in direct["optimizer"]["param_groups"]:
        group["betas"] = list(group["betas"])  # JSON has no tuples
    assert_equal(ours, direct)
    assert len(ours["optimizer"]["state"]) == len(ours["param_names"])  # of what trains
    head, wte = ours["model"]["lm_head.weight"], ours["model"]["transformer.wte.weight"]
    assert head.data_ptr() == wte.data_ptr()


def test_checkpoint_that_is_sharded_is_read_by_rows(sound, monkeypatch):
    """As PyTorch's own reader reads it; and a few rows without the other rank's file."""
    path = os.path.join(sound, "step-000000004")
    source = checkpoint.open_sharded(path)
    ours = {key: tensor_of(source, key) for key in source.shapes}
    theirs = {key: torch.empty_like(t) for key, t in ours.items()}
    dcp.load(theirs, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    assert_equal(ours, theirs)
    read, opened = [], open

    def noted_open(file, *mode):
        read.append(os.path.basename(file))
        return opened(file, *mode)

    monkeypatch.setattr(checkpoint, "open", noted_open, raising=False)
    key = "model.transformer.wte.weight"  # 67 rows: 34 of rank 0, and 33 of rank 1
    for rows, files in ((slice(3, 34), ["__0_0.distcp"]), (slice(34, 99), ["__1_0.distcp"]),
                        (slice(33, 35), ["__0_0.distcp", "__1_0.distcp"])):
        value = checkpoint.open_sharded(path).get(key)
        read.clear()
        assert torch.equal(value[rows], ours[key][rows]) and read == files


def case_gather_memory(tmp, out):
    sizes = dict(n_layer=6, n_embd=510, n_head=3, gradient_accumulation_steps=2)
    run = built(tmp, strategy="full_shard", **sizes)
    steps(run)
    saver = claimed(run, out)
    before = training.resident("VmRSS", reset=True)
    save(saver, run, 1)
    n = [p.numel() * 4 for p in run.model.parameters()]
    return dict(above=training.resident("VmHWM") - before, state=3 * sum(n), largest=max(n))


def test_checkpoint_gather_memory(tmp):
    """A full save on 2 ranks: rank 0 holds the full state beside what training holds, rank 1 one
    parameter (and gloo's receive buffer)."""
    kwargs = dict(tmp=tmp, out=os.path.join(tmp, "memory"))
    zero, one = values(on_ranks(2, {"memory": (case_gather_memory, kwargs)}), "memory")
    slack = 30e6  # buffers of gloo and of the file
    assert zero["state"] >= 200e6 and zero["above"] <= 1.15 * zero["state"] + slack, zero
    assert one["above"] <= 2 * one["largest"] + slack, one
