"""
README.md, docs/, the notebook and --help tell the truth, after `rm -r extras tests/upstream` too:
what they name is here, or its section says "needs `extras/`".

    python -m pytest -q tests/test_pages.py
"""

import json
import os
import re
from glob import glob

import pytest
from harness import HERE, python

PAGES = ["README.md", "learn.ipynb", *sorted(glob("docs/*.md", root_dir=HERE))]
OF_EXTRAS = sorted(glob("extras/docs/*.md", root_dir=HERE))
DELETED = ("extras", "tests/upstream")  # maybe
# Keys and values that only files in extras/ know.
OPTIONS = r"cuda_graph|model=llama|optimizer=muon|\+lora\b|\+float8\b"
# Files that a page has its reader write, other programs', and those of DELETED.
UNKNOWN = "NAME.py OTHER.py mine.py rotary.py nadam.py zero_to_fp32.py".split()
UNKNOWN += ["recorded.py", "test_commands.py"]
# Flags of other programs.
FOREIGN = "nodes time output signal dependency tee".split()


def read(page):
    """Its text, of the notebook as if it were a page. No line of code begins with #, as headings
    do."""
    with open(os.path.join(HERE, page), encoding="utf-8") as f:
        text = as_page(json.load(f)) if page.endswith(".ipynb") else f.read()
    parts = re.split(r"(^```.*?^```)", text, flags=re.M | re.S)
    parts[1::2] = [re.sub(r"^#", " #", code, flags=re.M) for code in parts[1::2]]
    return "".join(parts)


def as_page(notebook):
    text = ""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            source = f"```\n{source}\n```"
        text += f"{source}\n\n"
    return text


def sections(page):
    """[(heading, the text under it)]"""
    parts = re.split(r"^#+ (.*)\n", "# \n" + read(page), flags=re.M)
    return [*zip(parts[1::2], parts[2::2])]


def anchors(page):
    """What GitHub makes of the headings."""
    titles = [title.lower() for title, _ in sections(page)]
    return [re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles]


def links(page, text):
    """[(path, anchor)] of its links to files here; paths are from the project's root."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if not re.match(r"\w+:", link):  # https:, mailto:
            path = os.path.join(os.path.dirname(page), path) if path else page
            found.append((os.path.normpath(path), anchor))
    return found


def is_here(path):
    return os.path.exists(os.path.join(HERE, path))


@pytest.mark.parametrize("page", [*PAGES, *OF_EXTRAS])
def test_pages_links_point_to_what_is_here(page):
    for path, anchor in links(page, read(page)):
        if is_here(path) or not path.startswith(DELETED):
            assert is_here(path), path
            assert not anchor or anchor in anchors(path), f"{path}#{anchor}"


@pytest.mark.parametrize("page", PAGES)
def test_pages_say_what_needs_something_that_a_fork_may_have_deleted(page):
    for title, text in sections(page):
        names = [path for path, _ in links(page, text)]
        names += re.findall(r"\b(?:extras|tests/upstream)[/.]\w[\w/.]*", text)
        names += ["extras: " + option for option in re.findall(OPTIONS, text)]
        for name in names:
            for part in DELETED:
                said = re.search(rf"needs?\s+`{part}", text)
                assert said or not name.startswith(part), f"{title}: {name}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.endswith(".md")])
def test_pages_files_and_flags_are_here(page):
    files = glob("**/*.*", root_dir=HERE, recursive=True)
    code = "".join(read(path) for path in files if path.endswith(".py"))
    stays = ["/" + path for path in files if not path.startswith(DELETED)]
    for title, text in sections(page):
        text = re.sub(r"https?:\S*", "", text)
        for path in re.findall(r"\w[\w/-]*\.(?:py|md|ipynb)\b", text):
            known = path in UNKNOWN or path.startswith(DELETED)
            assert known or any(file.endswith("/" + path) for file in stays), f"{title}: {path}"
        if not is_here("extras") and re.search(r"needs?\s+`extras/`", text):
            continue  # its flags may be those of a program there
        for flag in re.findall(r"--([a-z_]+)=", text):
            # an option of argparse, a key of a run, or of a model
            known = re.search(rf"--{flag}\b|^    {flag}: ", code, re.M)
            assert known or flag in FOREIGN, f"{title}: --{flag}"


def test_pages_help_says_what_needs_extras():
    p = python("train.py", "--help", cwd=HERE)
    keys = re.split(r"\n    (?=\w+: )", p.stdout)
    assert len(keys) > 50
    for key in keys:
        said = "extras/" in key
        assert said or not re.search(r"muon|float8|lora|llama|record|Hugging", key, re.I), key
