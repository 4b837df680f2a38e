"""
Damage to a checkpoint is noticed, and an older one taken. Nothing in one runs.

    python -m pytest -q tests/test_damage.py

faults.py damages files between two runs.
"""

import os
import pickle
import random
import shutil
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from harness import on_ranks, refused, values
from saver import resumed
from training import arguments, launch, read_ckpt, tensor_of, trained

import checkpoint
import sample
from ranks import World, setup

NEW, OLD = "step-000000004", "step-000000002"
NAME = "transformer.wte.weight"


@pytest.fixture(scope="module")
def sound(tmp):
    """{kind: (out_dir with checkpoints of steps 2 and 4, {key: tensor} of step 4)}."""
    out = {}
    for kind in ("full", "sharded"):
        directory = os.path.join(tmp, f"sound-{kind}")
        run = dict(checkpoint=kind, gradient_accumulation_steps=2)
        launch(2, arguments(tmp, directory, max_iters=4, eval_interval=2, **run))
        source = checkpoint.find(directory, World())
        out[kind] = directory, {key: tensor_of(source, key) for key in source.shapes}
    return out


@pytest.fixture
def out(sound, tmp_path):
    """A copy of the sharded ones, to spoil."""
    return shutil.copytree(sound["sharded"][0], tmp_path / "out")


def found(out):
    """The step of the newest intact checkpoint, None if all are damaged."""
    try:
        return checkpoint.find(str(out), World()).header["iter_num"]
    except SystemExit as e:
        assert "move it away" in e.code and "\n" not in e.code
        return None


# -----------------------------------------------------------------------------
# bytes


def spoiled(good, rng, i):
    """A bit turned, 512 bytes zeroed, or the end gone."""
    data, at = bytearray(good), rng.randrange(len(good))
    if i % 3 == 0:
        data[at] ^= 1 << rng.randrange(8)
    elif i % 3 == 1:
        data[at:at + 512] = bytes(len(data[at:at + 512]))
    else:
        data = data[:at]
    return bytes(data)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_damage_never_loads(sound, tmp_path, kind):
    """
    60 times, in each file of the newest checkpoint: it is refused, or, of a full one, every tensor
    is as it was (a zip has bytes that mean nothing).
    """
    out = shutil.copytree(sound[kind][0], tmp_path / "out")
    names = ["ckpt.pt"]
    if kind == "sharded":
        names = [".metadata", "__0_0.distcp", "__1_0.distcp", "header.json"]
        assert sorted(os.listdir(out / NEW)) == names
        names = names[1:]  # nothing reads .metadata
    rng, noticed = random.Random(4), 0
    for i in range(60):
        path = (out / NEW if kind == "sharded" else out) / names[i // 3 % len(names)]
        good = path.read_bytes()
        data = spoiled(good, rng, i)
        path.write_bytes(data)
        step = found(out)
        if step == 4 and data != good:
            source = checkpoint.find(str(out), World())
            good_ones = sound[kind][1].items()
            assert all(torch.equal(tensor_of(source, key), t) for key, t in good_ones), i
        elif step != 4:
            assert step == (2 if kind == "sharded" else None)
            noticed += 1
        path.write_bytes(good)
    assert noticed > 40 and found(out) == 4


def test_damage_of_a_large_file_is_noticed_at_its_beginning_and_end(tmp_path):
    """Files and records are read in pieces."""
    data = random.Random(6).randbytes(2**24 + 9)
    (tmp_path / "rows").write_bytes(data)
    assert checkpoint.checksum(tmp_path / "rows") == zlib.crc32(data)
    torch.save(torch.frombuffer(bytearray(data), dtype=torch.uint8), tmp_path / "ckpt.pt")
    source = checkpoint.Source(tmp_path / "ckpt.pt", {}, {})
    checkpoint.check(source, World())
    whole = bytearray((tmp_path / "ckpt.pt").read_bytes())
    whole[whole.index(data[-9:])] ^= 1
    (tmp_path / "ckpt.pt").write_bytes(whole)
    with pytest.raises(zipfile.BadZipFile):
        checkpoint.check(source, World())


def test_damage_is_said_and_the_run_goes_on_from_the_older_one(out, tmp):
    """Or stops, where none is left. One rank alone sees the damage."""
    run = dict(checkpoint="sharded", gradient_accumulation_steps=2, init_from="auto", max_iters=2)
    for path, code in ((out / NEW / "__1_0.distcp", 0), (out / OLD / "__0_0.distcp", 1)):
        path.write_bytes(path.read_bytes()[:-100])
        p = trained(2, arguments(tmp, out, **run))
        assert p.returncode == code and ("at step 2" in p.stdout) == (code == 0), p.stderr
        assert str(out / NEW) in p.stderr and "move it away" in p.stderr
        assert p.stderr.count("\n") == 1, p.stderr


def case_replaced(sound, out):
    """What two ranks find in a directory whose run has saved again between their opens."""
    world = setup("cpu", "auto")
    mine = shutil.copytree(sound, f"{out}-{world.rank}")
    if world.rank == 1:
        torch.save({**read_ckpt(mine), "iter_num": 6}, f"{mine}/ckpt.pt")
    os.chdir(mine)  # so that both ranks call it by one name
    return refused(checkpoint.find, ".", world)


def test_damage_is_what_ranks_see_differently(sound, tmp_path):
    """They must not begin at different steps."""
    kwargs = dict(sound=sound["full"][0], out=f"{tmp_path}/out")
    for line in values(on_ranks(2, {"replaced": (case_replaced, kwargs)}), "replaced"):
        assert "ckpt.pt: damaged, or replaced by a run that goes on; " in line


@pytest.mark.parametrize("size", [1, 2, 3])
def test_damage_is_looked_for_by_all_ranks_together(sound, out, size):
    """Each record of a full one, and each file of a sharded one, is read by one of them."""
    full = Path(shutil.copy(os.path.join(sound["full"][0], "ckpt.pt"), out))
    data = full.read_bytes()
    at = data.index(read_ckpt(out)["model"][NAME].numpy().tobytes())
    full.write_bytes(data[:at] + b"damage" + data[at + 6:])
    file = out / NEW / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    for source in (checkpoint.open_full(full), checkpoint.open_sharded(out / NEW)):
        seen = []
        for rank in range(size):
            try:
                checkpoint.check(source, World(rank=rank, size=size))
            except (zipfile.BadZipFile, ValueError):
                seen.append(rank)
        assert len(seen) == 1


# -----------------------------------------------------------------------------
# what a file says


class RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("edit, message", [
    (lambda c: c["config"].update(model="out-x.evil"), "no out-x.evil.py"),
    (lambda c: c["config"].update(seed=RunsCode("ran")), "tensors and plain values"),
    (lambda c: c["model"].update({"transformer.h.3.ln_1.weight": torch.ones(30)}),
     "transformer.h.3.ln_1.weight"),
    (lambda c: c["model"].pop("transformer.h.2.ln_1.weight"), "transformer.h.2.ln_1.weight"),
    (lambda c: c.pop("iter_num"), "KeyError: 'iter_num'"),
    (lambda c: c["optimizer"]["state"][0].update(exp_avg=torch.zeros(3, 3)), "of another model")])
def test_damage_of_what_a_full_one_means_is_one_line(
        sound, tmp, tmp_path, monkeypatch, edit, message):
    ckpt = read_ckpt(sound["full"][0])
    edit(ckpt)
    torch.save(ckpt, tmp_path / "ckpt.pt")
    monkeypatch.chdir(tmp_path)  # where the code would run
    line = refused(resumed, tmp, tmp_path)
    assert message in line and "weights_only" not in line
    assert sorted(os.listdir(tmp_path)) == ["ckpt.pt"]


@pytest.mark.parametrize("edit, anew", [
    (lambda ckpt: None, 0), (lambda ckpt: ckpt["optimizer"]["state"].clear(), 40),
    (lambda ckpt: ckpt.pop("optimizer"), 40)])  # for others weights are enough
def test_damage_optimizer_state_that_is_missing_is_said(sound, tmp, tmp_path, capsys, edit, anew):
    ckpt = read_ckpt(sound["full"][0])
    edit(ckpt)
    torch.save(ckpt, tmp_path / "ckpt.pt")
    model, optimizer = resumed(tmp, tmp_path)
    line = f"{tmp_path}/ckpt.pt has no optimizer state"
    assert (line in capsys.readouterr().out) == (anew > 0)
    assert len(optimizer.state) == 40 - anew
    assert torch.equal(model.transformer.wte.weight, ckpt["model"][NAME])
    model(*torch.ones(2, 1, 4, dtype=torch.long))[1].backward()
    optimizer.step()


def test_security_metadata_runs_no_code(out, tmp, tmp_path, monkeypatch):
    """DCP's own file, a pickle: through every door."""
    trap = tmp_path / "ran"
    (out / NEW / ".metadata").write_bytes(pickle.dumps(RunsCode(str(trap))))
    resumed(tmp, out)
    monkeypatch.setattr(sample, "tokenizer", lambda *meta: (lambda text: [1], str, 67))
    sample.main([f"--out_dir={out}", "--max_new_tokens=1"])
    assert found(out) == 4 and not trap.exists()
