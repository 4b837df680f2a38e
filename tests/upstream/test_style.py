"""
This repository's own style, files and keys: its pages say what the code says, it is short, and its
house is small. A fork deletes this directory.

    python -m pytest -q tests/upstream/test_style.py
"""

import ast
import io
import os
import re
import subprocess
import tokenize

import pytest
from commands import pages, read, require_links
from harness import HERE, python
from test_config import keys, require_read_and_tested, text_of
from test_readme import CORE, floors, house, that_know_strategies_by_name

from configurator import STRATEGIES


@pytest.mark.parametrize("page", pages())
def test_readme_links_point_to_what_exists(page):
    require_links(page)


def test_readme_pages_of_the_core_do_not_need_extras():
    """A fork that has deleted it has no page that speaks of it, but for README."""
    for page in pages():
        assert page == "README.md" or "extras" not in read(page), page


def test_readme_ruff_passes():
    pytest.importorskip("ruff")
    p = python("-m", "ruff", "check", HERE)
    assert p.returncode == 0, p.stdout


def test_ci_installs_each_package_that_a_page_names():
    """README's command for the tests, or what .ci/run adds to it for the rest."""
    installed = {"notebook"}  # its server; nbclient runs the notebook
    for line in re.findall(r"pip install (.*?)(?: &&|$)", read("README.md"), re.M):
        installed.update(line.split())
    installed.update(re.search(r'^packages="(.*)"', read(".ci/run"), re.M)[1].split())
    for page in [*pages(), *pages(of_extras=True)]:
        for names in re.findall(r"`pip install (.*?)`|^pip install (.*)$", read(page), re.M):
            for name in "".join(names).replace('"', "").split():
                assert {name, f"{name}[hf]"} & installed, (page, name)


def test_readme_shows_the_heart_of_minimal():
    """Whole lines of it, in its order; dots stand for those between."""
    block = re.search(r"^```python\n(.*?)^```", read("README.md"), re.M | re.S)[1]
    shown = [line for line in block.splitlines() if line.strip() != "..."]
    left = iter(read("minimal.py").splitlines())
    assert 10 <= len(shown) <= 14 and all(line in left for line in shown)


def test_readme_is_short():
    assert len(read("README.md").split()) <= 1300


def code_lines(path):
    """Its lines of code: no blanks, comments or docstrings."""
    text = read(path)
    docstrings, code = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.update(range(first.lineno, first.end_lineno + 1))
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
              tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def test_readme_counts_the_code():
    """minimal.py's lines, to 5; those of train.py and all that it imports, to 50; of each row of
    its files, to a tenth."""
    text = " ".join(read("README.md").split())
    minimal, imports, imported, code = (int(number.replace(",", "")) for number in re.search(
        r"minimal.py\), (\d+) lines: .* the (\d+) files that it loads are ([\d,]+) lines, ([\d,]+) "
        "without", text).groups())
    assert abs(len(read("minimal.py").splitlines()) - minimal) <= 5
    rooms = house(CORE)["train"] | {"train"}
    assert all(house(CORE)[room] <= rooms for room in rooms)  # nothing lies deeper
    files = [f"{room}.py" for room in rooms - {"data"}]
    files += [f"data/{name}.py" for name in ("loader", "files", "tokenizer")]
    assert len(files) == 1 + imports
    assert abs(sum(len(read(path).splitlines()) for path in files) - imported) <= 50
    assert abs(sum(map(code_lines, files)) - code) <= 50
    rows = re.findall(r"^\| (`.*?) \| .* \| ([\d,]+) \|$", read("README.md"), re.M)
    assert len(rows) == 9
    if not os.path.exists(os.path.join(HERE, ".git")):
        pytest.skip("git does not know which files are the repository's")
    for names, lines in rows:
        paths = [path for name in re.findall("`(.*?)`", names) for path in files_of(name)]
        found = sum(len(read(path).splitlines()) for path in paths)
        assert found == pytest.approx(int(lines.replace(",", "")), rel=0.1), names


def files_of(name):
    """The text files of a file or directory of the repository, as git lists them."""
    listed = subprocess.run(["git", "ls-files", name], cwd=HERE, capture_output=True, text=True)
    return [path for path in listed.stdout.split() if not path.endswith(".png")]


def test_minimal_is_what_docs_measure():
    """bare.py in docs/measurements.md is minimal.py at other sizes."""
    bare = re.search(r"# bare.py.*?^```", read("docs/measurements.md"), re.M | re.S)[0]
    replaced = re.findall(r'^    "(.*?)": ', bare, re.M)
    assert len(replaced) == 7
    for text in replaced:
        assert text in read("minimal.py"), text


def test_house_has_few_floors_and_no_circle():
    found = house(CORE)
    assert floors(found) <= 5
    core = [room for room in found if f"`{room}.py`" in read("README.md")]  # not your own model
    assert sum(len(found[room]) for room in core) <= 35
    assert max(map(len, found.values())) <= 13


def test_house_fork_names_all_that_know_strategies_by_name():
    recipe = re.search(r"\n## Another strategy\n.*?\n## ", read("docs/fork.md"), re.S)[0]
    found = that_know_strategies_by_name(CORE.values())
    assert "parallelize" in found  # what the search would find, if it works
    assert [name for name in found if f"`{name}`" not in recipe] == []
    code = "\n".join(map(read, CORE.values()))
    for name in set(re.findall(r"`(\w+)`", recipe)) - {*STRATEGIES, "shard"}:
        assert re.search(rf"^(def {name}\(|{name} = )", code, re.M), name


def test_config_every_key_is_read_and_tested():
    """A key that no code reads, or no test sets, is a defect."""
    code = text_of("[!t]*.py", "train.py", "data/*.py")
    tests = text_of("test_fsdp.py", "tests/*.py", "config/*.py")
    ours = [f for f in keys("gpt2") if f.name != "momentum"]  # which extras/muon.py reads
    require_read_and_tested(ours, code, tests)
