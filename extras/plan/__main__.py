"""python -m extras.plan CONFIG [--key=value ...]"""

import sys
from pathlib import Path

# Started by its path, this file does not see the repository.
sys.path.insert(0, str(Path(__file__).absolute().parents[2]))
from extras.plan import main  # noqa: E402
from ranks import run  # noqa: E402

run(main, sys.argv[1:])
