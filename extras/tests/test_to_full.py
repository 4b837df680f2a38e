"""
extras/to_full.py.

    python -m pytest -q extras/tests/test_to_full.py
"""

import torch
from harness import refused, script
from saver import claimed, found, save
from training import built

import saves
from extras import to_full
from extras.to_full import whole


def test_the_newest_checkpoint_becomes_one_file(tmp, tmp_path):
    """While no run is there, which could remove what it reads."""
    run = built(tmp, checkpoint="sharded")
    saver = claimed(run, tmp_path)
    save(saver, run, 3)
    saver.finish()
    directory = saves.RunDirectory(str(tmp_path))
    directory.lock()
    assert "in use" in refused(to_full.main, [str(tmp_path)])
    directory.lock_file.close()
    sharded = found(tmp_path)
    p = script("extras/to_full.py", tmp_path)
    assert p.returncode == 0 and p.stdout == f"{sharded.path} -> {tmp_path}/ckpt.pt\n", p.stderr
    full = found(f"{tmp_path}/ckpt.pt")
    assert full.header["iter_num"] == 3 and sharded.shapes.keys() <= full.shapes.keys()
    assert all(torch.equal(whole(full, key), whole(sharded, key)) for key in sharded.shapes)
    assert "not a sharded one" in refused(to_full.main, [f"{tmp_path}/ckpt.pt"])
