"""
The contract of a model file (tests/test_contract.py), asked of llama.py.

    python -m pytest -q extras/tests/test_contract_of_extras.py
"""

import pytest
from test_contract import (  # noqa: F401  pytest finds them here
    pytest_generate_tests,
    test_contract_modes,
    test_contract_of_each_build,
    test_contract_of_the_file,
    test_contract_resume,
)

pytestmark = pytest.mark.slow

USUAL = ["llama"]
