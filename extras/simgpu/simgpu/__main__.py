"""python -m simgpu PROGRAM [ARGUMENTS]: run it with simulated GPUs. Or torchrun -m simgpu ..."""

import os
import runpy
import sys

if len(sys.argv) < 2:
    sys.exit("usage: SIM_GPUS=2 python -m simgpu PROGRAM.py [arguments]")
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
