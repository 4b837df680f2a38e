"""
What is here: GPUs and their links, versions, compilers, cores and memory, as JSON. A process of its
own, since CUDA is then used by no other. No names of hosts or users, no paths, no addresses.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).absolute().parents[2]))
from ranks import usable_cores  # noqa: E402

PACKAGES = ("torch", "numpy", "triton", "torchao")


def said_by(*command):
    """What a program prints; "" if it is not here or fails."""
    if not shutil.which(command[0]):
        return ""
    p = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return p.stdout.strip() if p.returncode == 0 else ""


def gpus():
    found = []
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        found.append(dict(
            name=properties.name,
            memory=properties.total_memory,
            capability=f"{properties.major}.{properties.minor}",
        ))
    return found


def links():
    """The rows of GPUs in nvidia-smi's table of the topology."""
    colours = r"\x1b\[\d*m"
    table = re.sub(colours, "", said_by("nvidia-smi", "topo", "-m"))
    # Not the first line: it names the columns, and begins with GPU0 too.
    return [line.split() for line in table.splitlines()[1:] if re.match(r"GPU\d+\s", line)]


def versions():
    found = dict(python=sys.version.split()[0], cuda=torch.version.cuda)
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    found["driver"] = said_by(
        "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    with suppress(Exception):  # a simulated GPU has none, and a CUDA build then raises
        found["cudnn"] = torch.backends.cudnn.version()
    with suppress(Exception):  # a build without NCCL
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for compiler in ("gcc", "g++", "clang", "nvcc"):
        numbers = re.findall(r"\d+\.\d+[.\d]*", said_by(compiler, "--version"))
        found[compiler] = numbers[-1] if numbers else None
    return found


def host_memory():
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def main():
    print(json.dumps(dict(
        gpus=gpus(),
        simulated="simgpu" in sys.modules,
        links=links(),
        versions=versions(),
        cores=usable_cores(),
        host_memory=host_memory(),
    )))


if __name__ == "__main__":
    main()
