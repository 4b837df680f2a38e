"""
Damage to a checkpoint is noticed, and an older one taken. Nothing in one runs.

    python -m pytest -q tests/test_damage.py

test_data.py has the same for meta.pkl, and faults.py damages files between two runs.
"""

import io
import json
import os
import pickle
import random
import re
import shutil
import zipfile
import zlib
from unittest.mock import patch

import pytest
import torch
from harness import (
    HERE,
    Ranks,
    arguments,
    launch,
    on_ranks,
    read_ckpt,
    refused,
    started,
    tiny,
    trained,
    values,
)
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
)

import checkpoint
import sample
import saves
import train
from configurator import resolve
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
        out[kind] = directory, {key: source.whole(key) for key in source.shapes}
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
        assert "remove" not in e.code and "delete" not in e.code  # it may be a good one
        assert "damaged" in e.code or "not readable" in e.code
        assert "pass another out_dir" in e.code and "\n" not in e.code
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
    rng, noticed = random.Random(4), 0
    for i in range(60):
        path = (out / NEW if kind == "sharded" else out) / names[i // 3 % len(names)]
        good = path.read_bytes()
        data = spoiled(good, rng, i)
        path.write_bytes(data)
        step = found(out)
        if step == 4 and data != good:
            assert kind == "full"
            source = checkpoint.find(str(out), World())
            assert all(torch.equal(source.whole(key), t) for key, t in sound[kind][1].items()), i
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
    assert checkpoint.is_intact(source, World())
    whole = bytearray((tmp_path / "ckpt.pt").read_bytes())
    whole[whole.index(data[-9:])] ^= 1
    (tmp_path / "ckpt.pt").write_bytes(whole)
    with pytest.raises(zipfile.BadZipFile):
        checkpoint.is_intact(source, World())


def test_damage_of_metadata_is_noticed_before_anything_is_unpickled(out):
    path = out / NEW / ".metadata"
    path.write_bytes(path.read_bytes() + b" ")
    with patch.object(checkpoint, "MetadataUnpickler", side_effect=AssertionError):
        with pytest.raises(ValueError):
            checkpoint.open_sharded(str(out / NEW))
    assert found(out) == 2


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "header.json"])
def test_damage_a_file_of_another_step_or_none_is_noticed(out, name):
    shutil.copy(out / OLD / name, out / NEW / name)
    assert found(out) == 2
    os.remove(out / NEW / name)
    assert found(out) == 2


@pytest.mark.parametrize("world, what", [(1, "one"), (2, "one"), (2, "all")])
def test_damage_is_said_and_the_run_goes_on_from_the_older_one(out, tmp, world, what):
    """Or stops, where none is left. On two ranks one alone sees the damage."""
    for path in [out / NEW / "__1_0.distcp", out / OLD / "__0_0.distcp"][:1 + (what == "all")]:
        path.write_bytes(path.read_bytes()[:-100])
    run = dict(checkpoint="sharded", gradient_accumulation_steps=2)
    p = trained(world, arguments(tmp, out, init_from="auto", max_iters=6, **run))
    assert str(out / NEW) in p.stderr and "move it away" in p.stderr
    assert p.stderr.count("\n") == 1, p.stderr
    if what == "all":
        assert p.returncode == 1
    else:
        assert p.returncode == 0 and "at step 2" in p.stdout, p.stderr


def test_damage_is_looked_for_on_a_slow_disk(out):
    """Another rank may read for longer than a collective of training may take."""
    with patch.object(checkpoint, "all_reduce_mean_", return_value=1.0) as agree:
        assert found(out) == 4
    assert agree.call_args.kwargs == {"patient": True}


def case_replaced(sound, out, kind):
    """What two ranks find in a directory whose run has saved again between their opens; or whose
    newest one rank 1 does not see."""
    world = setup("cpu", "auto")
    mine = shutil.copytree(sound, f"{out}-{world.rank}")
    if world.rank == 1 and kind == "full":
        torch.save({**read_ckpt(mine), "iter_num": 6}, f"{mine}/ckpt.pt")
    elif world.rank == 1:
        shutil.rmtree(f"{mine}/{NEW}")
    os.chdir(mine)  # so that both ranks call it by one name
    try:
        return checkpoint.find(".", world).header["iter_num"]
    except SystemExit as e:
        return e.code
    finally:
        os.chdir(HERE)


def test_damage_is_what_ranks_see_differently(sound, tmp_path):
    """They must not begin at different steps."""
    cases = {kind: (case_replaced, dict(sound=sound[kind][0], out=f"{tmp_path}/{kind}", kind=kind))
             for kind in sound}
    results = on_ranks(2, cases)
    zero, one = values(results, "full")
    assert "ckpt.pt: another rank finds it damaged, or not there; " in zero
    assert "ckpt.pt: replaced meanwhile by a run that goes on (try again); " in one
    assert values(results, "sharded") == [2, 2]


@pytest.fixture
def two_full(sound, tmp_path):
    """(out_dir, its last.pt of step 4); its ckpt.pt is of step 2."""
    newest = shutil.copy(os.path.join(sound["full"][0], "ckpt.pt"), tmp_path / "last.pt")
    torch.save({**read_ckpt(sound["full"][0]), "iter_num": 2}, tmp_path / "ckpt.pt")
    return tmp_path, newest


def test_damage_is_looked_for_in_the_tensors_of_the_newest_full_one_only(two_full):
    out, newest = two_full
    real, read = zipfile.ZipFile.open, {}

    def opened(records, name, *args, **kwargs):
        read.setdefault(records.filename, set()).add(name)
        return real(records, name, *args, **kwargs)

    with patch.object(zipfile.ZipFile, "open", opened):
        assert found(out) == 4
    with zipfile.ZipFile(newest) as records:
        assert read[str(newest)] == set(records.namelist())
    assert {name.rpartition("/")[2] for name in read[f"{out}/ckpt.pt"]} == {"data.pkl"}


def test_damage_of_a_full_one_is_looked_for_by_all_ranks_together(two_full):
    """Each record is read by one of them."""
    _, newest = two_full
    good = newest.read_bytes()
    newest.write_bytes(in_a_tensor(good))
    for size in (1, 2, 3):
        worlds = [World(rank=rank, size=size) for rank in range(size)]
        seen = [checkpoint.open_intact(str(newest), 4, world)[0] for world in worlds]
        assert seen.count(None) == 1


def test_damage_of_a_sharded_one_is_looked_for_by_all_ranks_together(out, monkeypatch):
    """Each reads its own file, of a dozen too, and rank 0 only headers until one is chosen."""
    with open(out / NEW / checkpoint.HEADER) as f:
        header = json.load(f)["header"]
    names = [f"__{rank}_0.distcp" for rank in range(12)]
    assert [*header["files"]] == [*names[:2], ".metadata"]
    header["files"] = dict.fromkeys([*names, ".metadata"], 0)
    source = checkpoint.Source("there", header, {}, sharded=True)
    read = []
    monkeypatch.setattr(checkpoint, "checksum", lambda path: read.append(path) or 0)
    for rank in range(12):
        assert checkpoint.is_intact(source, World(rank=rank, size=12))
    assert read == ["there/__0_0.distcp", "there/.metadata", *(f"there/{n}" for n in names[1:])]
    with patch.object(checkpoint, "MetadataUnpickler", side_effect=ZeroDivisionError):
        assert [step for _, step in checkpoint.list_all(str(out))[0]] == [4, 2]


def in_a_tensor(data):
    at = data.index(torch.load(io.BytesIO(data))["model"][NAME].numpy().tobytes())
    return data[:at] + b"damage" + data[at + 6:]


def in_its_step(data):
    """Step 1 instead of 4, which would make it the older one."""
    return re.sub(rb"(?s)(iter_num(?:q.|r....)K)\x04", rb"\1" + b"\x01", data)


@pytest.mark.parametrize("spoil", [in_a_tensor, in_its_step])
def test_damage_of_the_newest_full_one_is_said_and_the_older_one_taken(two_full, capsys, spoil):
    out, newest = two_full
    good = newest.read_bytes()
    newest.write_bytes(spoil(good))
    assert newest.read_bytes() != good
    assert found(out) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"skipping {newest}: ") and line.count("\n") == 1
    (out / "ckpt.pt").write_bytes(in_a_tensor((out / "ckpt.pt").read_bytes()))
    assert found(out) is None


# -----------------------------------------------------------------------------
# what a file says


def resumed(tmp, out):
    """The model and optimizer that a run with init_from=resume begins with."""
    cfg = resolve(tiny(tmp, out_dir=str(out), init_from="resume"), World())
    cfg, source, _ = started(cfg, World())
    return train.build(train.meta_model(cfg), cfg, World(), source)


class RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


ODD = [  # an edit of ckpt.pt, what the line says
    (lambda c: c["config"].update(model="out-x.evil"), "model='out-x.evil'"),
    (lambda c: c["config"].update(seed=RunsCode("ran")), "tensors and plain values"),
    (lambda c: c["model_args"].update(vocab_size="67"), "vocab_size='67' must be a whole number"),
    (lambda c: c["model_args"].update(n_embd=30.5), "n_embd=30.5 must be a whole number"),
    (lambda c: c["model"].update({"transformer.h.3.ln_1.weight": torch.ones(30)}),
     "transformer.h.3.ln_1.weight"),
    (lambda c: c["model"].pop("transformer.h.2.ln_1.weight"), "transformer.h.2.ln_1.weight"),
    (lambda c: c.update(param_names=c["param_names"][:2]), "not readable"),
    (lambda c: c.pop("iter_num"), "KeyError: 'iter_num'"),
    (lambda c: [*map(c.pop, [key for key in c if key != "optimizer"])], "KeyError: 'model'"),
    (lambda c: c["model_args"].update(dim=30), "model_args: no key dim (model=gpt2)")]  # llama2.c


@pytest.mark.parametrize("edit, message", ODD)
def test_damage_of_what_a_full_one_means_is_one_line(
        sound, tmp, tmp_path, monkeypatch, edit, message):
    ckpt = read_ckpt(sound["full"][0])
    edit(ckpt)
    torch.save(ckpt, tmp_path / "ckpt.pt")
    monkeypatch.chdir(tmp_path)  # where the code would run
    line = refused(resumed, tmp, tmp_path)
    assert message in line and "weights_only" not in line
    assert sorted(os.listdir(tmp_path)) == ["ckpt.pt"]


def test_damage_before_pytorch_1_6_no_file_was_a_zip(sound, tmp, tmp_path):
    ckpt, old = read_ckpt(sound["full"][0]), dict(_use_new_zipfile_serialization=False)
    torch.save(ckpt, tmp_path / "ckpt.pt", **old)
    line = refused(resumed, tmp, tmp_path)
    assert "File is not a zip file" in line
    with open(os.path.join(HERE, "docs", "troubleshooting.md")) as f:
        assert "`File is not a zip file`" in f.read()  # and what to do


@pytest.mark.parametrize("edit, anew", [
    (lambda state: None, 0), (lambda state: state.pop(3), 1), (dict.clear, 40),
    (lambda state: state[3].pop("exp_avg"), 1)])
def test_damage_optimizer_state_that_is_missing_is_said(sound, tmp, tmp_path, capsys, edit, anew):
    ckpt = read_ckpt(sound["full"][0])
    edit(ckpt["optimizer"]["state"])
    torch.save(ckpt, tmp_path / "ckpt.pt")
    model, optimizer = resumed(tmp, tmp_path)
    line = f"{tmp_path}/ckpt.pt lacks optimizer state of {anew} parameters"
    assert (line in capsys.readouterr().out) == (anew > 0)
    assert len(optimizer.state) == 40 - anew
    model(*torch.ones(2, 1, 4, dtype=torch.long))[1].backward()
    optimizer.step()


# -----------------------------------------------------------------------------
# another version of PyTorch


def rewrite(step, change, **header):
    """Its .metadata after a change, pickled again; the header fits it."""
    metadata = pickle.loads((step / ".metadata").read_bytes())
    change(metadata)
    data = pickle.dumps(metadata)
    (step / ".metadata").write_bytes(data)
    header = {**checkpoint.read_header(str(step)), **header}
    header["files"][".metadata"] = zlib.crc32(data)
    (step / "header.json").write_text(checkpoint.sealed(header))


@pytest.mark.parametrize("fields", [5, 6, 7])
def test_damage_is_none_where_another_version_has_other_properties(sound, out, fields):
    """PyTorch 2.13 pickles 5 of a tensor, and 2.15 pickles 6. Each reads what the other writes."""
    def state(self):
        encoding = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
        known = (self.dtype, self.layout, self.requires_grad, encoding, self.pin_memory)
        return (*known, (1,), "of the future")[:fields]

    with patch.object(TensorProperties, "__getstate__", state):
        rewrite(out / NEW, lambda metadata: None)
    source = checkpoint.find(str(out), World())
    assert source.header["iter_num"] == 4 and source.header["torch"] == torch.__version__
    assert all(torch.equal(source.whole(key), t) for key, t in sound["sharded"][1].items())


def test_damage_is_none_where_python_pickles_an_enum_by_getattr(sound, out):
    """As 3.11.0 to 3.11.3 do, Debian 12's among them."""
    def by_name(member, protocol):
        return getattr, (type(member), member.name)

    with patch.object(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name):
        rewrite(out / NEW, lambda metadata: None)
    assert b"getattr" in (out / NEW / ".metadata").read_bytes()
    source = checkpoint.find(str(out), World())
    assert all(torch.equal(source.whole(key), t) for key, t in sound["sharded"][1].items())


# -----------------------------------------------------------------------------
# nothing runs


def attack_directly(metadata, trap):
    metadata.planner_data = RunsCode(trap)


def attack_by_bytes(metadata, trap):
    """PyTorch would load this entry with pickle: it claims to be no tensor."""
    key = next(iter(metadata.state_dict_metadata))
    metadata.state_dict_metadata[key] = BytesStorageMetadata()


def attack_by_attribute(metadata, trap):
    """A dotted name walks from an admitted class to another object."""
    metadata.planner_data = Metadata.__init__


@pytest.mark.parametrize("attack", [attack_directly, attack_by_bytes, attack_by_attribute])
def test_security_metadata_runs_no_code(out, tmp, tmp_path, attack):
    """Through every door: resume, sample, the command; and where PyTorch itself reads it."""
    step, trap = out / NEW, tmp_path / "ran"
    shutil.rmtree(out / OLD)
    rewrite(step, lambda metadata: attack(metadata, str(trap)))  # an attacker would seal it too
    resume = arguments(tmp, out, init_from="resume", max_iters=6)
    for file, argv in [(train, resume), (sample, [f"--out_dir={out}"]),
                       (saves, ["full", str(out)])]:
        p = Ranks(1, file.main, argv).finish()
        assert p.returncode == 1 and "it wants to run" in p.stderr, p.stderr
        assert p.stderr.count("\n") == 1
    assert not trap.exists()
