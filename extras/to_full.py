"""
The newest checkpoint of a run, sharded, as one file in nanoGPT's layout:

    python -m extras.to_full out-x    # writes out-x/ckpt.pt
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))
import checkpoint  # noqa: E402
from ranks import World, run  # noqa: E402
from saves import RunDirectory  # noqa: E402


def whole(source, key):
    """A value of a Source as a tensor on the CPU."""
    value = source.get(key)
    return value[:] if source.shapes[key] else value  # a scalar cannot be sliced


def main(argv):
    if len(argv) != 1 or argv[0].startswith("-"):
        raise SystemExit(__doc__.strip())
    out_dir = argv[0]
    directory = RunDirectory(out_dir)
    directory.lock()  # a run there might remove what we read
    source = checkpoint.find(out_dir, World())
    if source is None or source.files is None:
        raise SystemExit(f"{out_dir}: its newest checkpoint is not a sharded one")
    flat = {key: whole(source, key) for key in source.shapes}
    checkpoint.write_ckpt_pt(Path(directory.path, "ckpt.pt"), flat, source.header)
    print(f"{source.path} -> {directory.path}/ckpt.pt")


if __name__ == "__main__":
    run(main, sys.argv[1:])
