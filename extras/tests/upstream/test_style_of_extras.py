"""
The keys, rooms and pages of extras/, as tests/upstream/test_style.py asks of the core.

    python -m pytest -q extras/tests/upstream/test_style_of_extras.py
"""

import pytest
from commands import pages, read, require_links
from test_config import keys, require_read_and_tested, text_of
from test_house import EXTRAS
from test_readme import CORE, floors, house, that_know_strategies_by_name


@pytest.mark.parametrize("page", pages(of_extras=True))
def test_house_links_of_extras_point_to_what_exists(page):
    require_links(page)


def test_house_every_key_of_extras_is_read_and_tested():
    """A key that no code reads, or no test sets, is a defect."""
    code = text_of("[!t]*.py", "train.py", "data/*.py", "extras/*.py", "extras/plan/*.py")
    tests = text_of("test_fsdp.py", "tests/*.py", "extras/tests/*.py", "extras/config/*.py")
    for model in ("gpt2", "llama", "moe"):
        require_read_and_tested(keys(model), code, tests)


def test_house_with_extras_has_few_floors_and_no_circle():
    found = house({**CORE, **EXTRAS})
    assert floors(found) <= 8  # gpu_report stands on the plan, which stands on train.py
    assert max(map(len, found.values())) <= 13  # however many files it has


def test_house_pages_name_all_in_extras_that_know_strategies_by_name():
    text = "".join(map(read, pages(of_extras=True)))
    found = that_know_strategies_by_name(EXTRAS.values())
    assert "place" in found  # what the search would find, if it works
    assert [name for name in found if f"`{name}`" not in text] == []
