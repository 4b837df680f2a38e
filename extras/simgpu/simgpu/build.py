"""
Build device.cpp, once for each version of PyTorch, and keep it.

    python build.py          # prints where it lies, or in one line why it cannot be

It needs g++ or clang++ (or what CXX names), and the headers that are in PyTorch's wheel: half a
minute. The result lies in ~/.cache/simgpu (or SIM_CACHE, or XDG_CACHE_HOME), under a name made of
all that it depends on. Processes that want it at the same time wait for one of them to build it.
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "device.cpp")
FLAGS = ["-std=c++20", "-O1", "-shared", "-fPIC", "-w"]


class CannotBuild(ImportError):
    """Why, in one line."""


def torch_dir():
    """Where PyTorch is installed, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None:
        raise CannotBuild("simgpu: there is no torch")
    return os.path.dirname(spec.origin)


def library():
    """Path of the library, built if need be. Raises CannotBuild."""
    if sys.platform != "linux":
        raise CannotBuild(f"simgpu: it was only ever built on Linux, not on {sys.platform}")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise CannotBuild("simgpu: it needs a C++ compiler, g++ or clang++")
    torch = torch_dir()
    key = hashlib.sha256()
    for path in (SOURCE, os.path.join(torch, "version.py")):
        with open(path, "rb") as f:
            key.update(f.read())
    key.update(" ".join([compiler, *FLAGS]).encode())
    name = f"device-{key.hexdigest()[:16]}.so"
    directory = cache_dir()
    path = os.path.join(directory, name)
    if not os.path.exists(path):
        with open(path + ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.exists(path):  # another process may have been faster
                compile_to(path, compiler, torch)
    return path


def compile_to(path, compiler, torch):
    include = os.path.join(torch, "include")
    headers = [f"-I{include}", f"-I{include}/torch/csrc/api/include"]
    libraries = [f"-L{torch}/lib", "-lc10", "-ltorch_cpu"]
    unfinished = f"{path}.{os.getpid()}"
    command = [compiler, *FLAGS, *headers, SOURCE, "-o", unfinished, *libraries]
    try:
        p = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise CannotBuild(f"simgpu: {compiler}: {e}") from None
    if p.returncode:
        lines = p.stderr.splitlines() or ["it says nothing"]
        error = next((line for line in lines if "error" in line), lines[0])
        raise CannotBuild(f"simgpu: {compiler} does not build it with this PyTorch: {error}")
    # PyTorch checks what a library registers when it is loaded, and aborts the process.
    load = f"import ctypes; ctypes.CDLL('{torch}/lib/libtorch.so'); ctypes.CDLL('{unfinished}')"
    p = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True)
    if p.returncode:
        os.remove(unfinished)
        reason = (p.stderr.strip().splitlines() or [f"exit code {p.returncode}"])[0]
        raise CannotBuild(f"simgpu: this PyTorch does not load it: {reason}")
    os.replace(unfinished, path)


def cache_dir():
    """The first of these that can be written."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    named = os.environ.get("SIM_CACHE")
    of_user = f"simgpu-{os.getuid()}"
    places = [named, os.path.join(home, "simgpu"), os.path.join(tempfile.gettempdir(), of_user)]
    for place in filter(None, places):
        try:
            os.makedirs(place, mode=0o700, exist_ok=True)
        except OSError:
            continue
        # It will be loaded as code: so only from a directory that is this user's.
        if os.access(place, os.W_OK) and os.stat(place).st_uid == os.getuid():
            return place
    raise CannotBuild(f"simgpu: none of {places} can be written; set SIM_CACHE")


if __name__ == "__main__":
    try:
        print(library())
    except CannotBuild as e:
        sys.exit(str(e))
