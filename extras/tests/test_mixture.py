"""
A mixture of data sets (extras/mixture.py): proportions, epochs, any number of ranks, resuming.

    python -m pytest -q extras/tests/test_mixture.py
"""

import json
import math
import random
import re
import shutil

import numpy as np
import pytest
import torch
from harness import make_data, read_ckpt, read_metrics, refused, run_training, tiny

import sample
from data import loader
from extras.mixture import Mixture, parse_mixture
from ranks import World

WEIGHTS = [5, 2, 1]
CHARS = [chr(40 + i) for i in range(67)]


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """(a directory, the key `dataset`): three sets of 22, 22 and 5 windows; the last one has
    masks."""
    path = tmp_path_factory.mktemp("mixture")
    for seed in range(3):
        make_data(str(path / f"s{seed}"), n=400, seed=seed, chars=CHARS)
    for split, n in dict(train=90, val=33).items():
        tokens = np.fromfile(path / f"s2/{split}.bin", np.uint16)[:n]
        tokens.tofile(path / f"s2/{split}.bin")
        (np.arange(n) % 3 == 0).astype(np.uint8).tofile(path / f"s2/{split}.mask")
    return str(path), ",".join(f"{path}/s{i}:{w}" for i, w in enumerate(WEIGHTS))


def test_each_set_has_its_share_of_any_first_samples():
    draw = random.Random(0)
    some = [[draw.randint(1, 30) for _ in range(draw.randint(1, 7))] for _ in range(100)]
    for weights in [[7, 2, 1], [1], [1, 1], [97, 1, 1, 1], *some]:
        mixture, total = Mixture(weights), sum(weights)
        counts = [0] * len(weights)
        for n, number in enumerate(mixture.sets(0, 2 * total + 1).tolist()):
            assert mixture.taken(n) == counts
            counts[number] += 1
            for count, weight in zip(counts, weights):
                share = (n + 1) * weight
                assert share // total <= count <= math.ceil(share / total)
        assert mixture.sets(total - 1, 3).tolist() == mixture.sets(0, total + 2)[-3:].tolist()
    assert Mixture([7, 2, 1]).pattern.tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 0, 2]  # runs resume


def rows_of(dataset, ranks, steps, batch_size=2, accumulation=4):
    """Inputs of these steps' samples in order, and the sum of the weights of each step."""
    cfg = tiny("", dataset=dataset, batch_size=batch_size,
               gradient_accumulation_steps=accumulation, eval_iters=100)
    parts = [loader.open_batches(cfg, World(rank, ranks)) for rank in range(ranks)]
    rows, weights = [], []
    for step in steps:
        of_step = [part.get(step, micro)
                   for micro in range(accumulation // ranks) for part in parts]
        rows += [x for x, _, _ in of_step]
        mean = sum((y != -1).sum().item() for _, y, _ in of_step) / accumulation
        for _, y, weight in of_step:
            assert weight == pytest.approx((y != -1).sum().item() / mean)
        weights.append(sum(weight for _, _, weight in of_step))
    return torch.cat(rows), weights


def test_each_set_has_epochs_of_its_own_at_any_number_of_ranks(sets):
    path, dataset = sets
    rows, weights = rows_of(dataset, 1, range(12))  # 96 samples
    assert weights == pytest.approx([4.0] * 12)
    for ranks, batch_size, accumulation in ((2, 2, 4), (4, 1, 8), (4, 2, 4)):
        others, _ = rows_of(dataset, ranks, range(12), batch_size, accumulation)
        assert torch.equal(rows, others)
    assert torch.equal(rows[64:], rows_of(dataset, 1, range(8, 12))[0])  # a pure function of step

    orders = []
    for i, weight in enumerate(WEIGHTS):
        tokens = np.fromfile(f"{path}/s{i}/train.bin", np.uint16).tolist()
        n = (len(tokens) - 1) // 16
        # The first epoch's windows begin at 0, 16 ..., a later one's as many tokens after those.
        places = {tuple(tokens[at:at + 16]): at // 16 for at in range(len(tokens) - 16)}
        mine = [places[row] for row in map(tuple, rows.tolist()) if row in places]
        assert len(mine) == 96 * weight // 8
        epochs = [mine[start:start + n] for start in range(0, len(mine), n)]
        assert len(epochs) > 1 and epochs[0] != epochs[1]
        for epoch in epochs[:-1]:
            assert sorted(epoch) == list(range(n))
        orders.append(epochs[0])
    assert orders[0] != orders[1]  # of as many windows


def test_no_set_s_epoch_is_in_the_order_of_another_s():
    """As it would be if the sets' seeds were sums. Runs resume: the orders stay as they are."""
    orders = [loader.train_order(97, 7, 97 * epoch, 97, number).tolist()
              for number in range(3) for epoch in range(3)]
    assert len({tuple(window % 97 for window in order) for order in orders}) == 9
    found = loader.train_order(97, 7, 95, 5, number=2)
    assert (found % 97).tolist() == [93, 7, 34, 91, 39]


def test_a_mixture_resumes_bit_for_bit_and_says_the_loss_of_each_set(sets, monkeypatch, capsys):
    path, dataset = sets
    keys = dict(dataset=dataset, eval_interval=3, gradient_accumulation_steps=4, eval_iters=100)
    whole = run_training(path, "whole", max_iters=6, **keys)
    said = capsys.readouterr().out
    for i, (windows, weight) in enumerate(zip((22, 22, 5), WEIGHTS)):
        # 8 samples a step, of which so many eighths are this set's
        line = re.search(rf"^{path}/s{i}: .*", said, re.M)[0]
        assert f"epoch = {windows / weight:,.0f} steps" in line
    run_training(path, "parts", max_iters=3, **keys)
    run_training(path, "parts", max_iters=6, init_from="resume", **keys)
    rows = [read_metrics(f"{path}/{name}") for name in ("whole", "parts")]
    names = [f"{path}/s{i}" for i in range(3)]
    for one, other in zip(*rows):
        same = [key for key in one if "loss" in key or key == "grad_norm"]
        assert [one[key] for key in same] == [other[key] for key in same]
        if "val_loss" in one:
            for split in ("train", "val"):
                parts = [one[f"{split}_loss/{name}"] for name in names]
                assert len(set(parts)) == 3
                assert one[f"{split}_loss"] == pytest.approx(np.average(parts, weights=WEIGHTS))
    weights = [read_ckpt(f"{path}/{name}")["model"] for name in ("whole", "parts")]
    assert len(whole) == 6 and all(torch.equal(weights[0][key], p) for key, p in weights[1].items())
    assert capsys.readouterr().out.count(f", of {names[2]} ") == 4
    sample.main(["--start=ABC", f"--out_dir={path}/whole", "--device=cpu", "--num_samples=1",
                 "--max_new_tokens=3", "--dtype=float32"])
    assert capsys.readouterr().out.startswith("ABC")  # by the first set's meta.json


@pytest.mark.parametrize("mixture", [
    "{a},{b}", "{a}:1,{b}", "{a}:1,{b}:0", "{a}:1,{b}:-1", "{a}:1,:2", "{a}:1,,{b}:2",
    "{a}:1,{b}:1/0", "{a}:1,{b}:nan", "{a}:1,{a}:2", "{a}:1,{b}:x", "{a}:100001,{b}:0.5"])
def test_what_is_no_mixture_is_refused(sets, mixture):
    path, _ = sets
    dataset = mixture.format(a=f"{path}/s0", b=f"{path}/s1")
    assert dataset in refused(loader.open_batches, tiny("", dataset=dataset), World())


def test_weights_and_vocabularies(sets, tmp_path):
    assert not loader.is_mixture("web")
    assert parse_mixture("web:0.7,c:/code:0.2,math:1/10") == {"web": 7, "c:/code": 2, "math": 1}
    assert parse_mixture("a:60000,b:60000") == {"a": 1, "b": 1}  # else they repeat too late
    assert parse_mixture("a:0.6,b:0.3") == {"a": 2, "b": 1}
    directory = tmp_path / "a:1,b"  # a name, since it is there
    directory.mkdir()
    assert not loader.is_mixture(str(directory)) and loader.is_mixture("a:1,b:2")

    path, _ = sets
    other = str(tmp_path / "other")
    make_data(other, n=400, chars=CHARS)
    cfg = tiny("", dataset=f"{path}/s0:1,{other}:1", eval_iters=9)
    for meta in ({"vocab_size": 67, "tokenizer": "bytes"}, {"vocab_size": 66}, {}):
        with open(f"{other}/meta.json", "w") as f:
            json.dump(meta, f)
        assert f"{path}/s0" in refused(loader.open_batches, cfg, World())
    with open(f"{other}/meta.json", "w") as f:  # as many characters, of which two change places
        json.dump({"vocab_size": 67, "chars": [CHARS[1], CHARS[0], *CHARS[2:]]}, f)
    assert f"{path}/s0" in refused(loader.open_batches, cfg, World())
    shutil.copy(f"{path}/s0/meta.json", f"{other}/meta.json")
    loader.open_batches(cfg, World())
    with open(f"{other}/tokenizer.json", "w") as f:  # another one of the same size
        f.write("{}")
    assert f"{path}/s0" in refused(loader.open_batches, cfg, World())
