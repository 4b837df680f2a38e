"""
Text is what the file says (data/documents.py): every way is tried in which a reader could change
a value, lose a row or move a column; and an error names the file and the row.

    python -m pytest -q tests/test_documents.py
"""

import csv
import gzip
import io
import json
from types import SimpleNamespace

import pytest
from harness import refused

from data.documents import documents, render, rows


def texts(path, content, template="{text}"):
    """What becomes of the rows of a file with this content (in bytes, or else in UTF-8)."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    args = SimpleNamespace(source=[str(path)], subset=None)
    return [*documents(args, "train", lambda *row: render(template, *row))]


# What a reader that guesses takes for a number, a date, a truth value or nothing.
GUESSED = [
    "007", "1e5", "1.10", "+1", "-0", ".5", "1_000", "0x10", "1,5", "\u0661", "1" * 5000,
    "NA", "null", "None", "NaN", "-inf", "#N/A", "true", "T", "2020-01-01", "2020-01-01T10:00:00Z",
    " before", "after ", "\ttab\t", "\u00a0nbsp\u00a0", "  ", "#comment", "'quoted'", "\\n", "a\\",
    "a\u2028b\u2029c", "a\u0085b", "a\x0bb\x0cc\x1cd\x1ee", "\x1a", "\ufeff",
    "\U0001f31e", "e\u0301", "\ufffd", "x" * 200_000]
QUOTED = ['"', '""', 'say "a"', "a,b", "a\tb", "a\nb", "a\r\nb", "a\rb", "\n", '"\n"', ",", '","']


@pytest.mark.parametrize("value", GUESSED + QUOTED, ids=lambda value: ascii(value)[:30])
def test_a_value_is_the_file_s_in_every_format(tmp_path, value):
    """Alone, and between values of another kind, whose type or length it does not take. (In a
    .tsv a tab inside quotes is refused: in many of them quotes are text.)"""
    for others in ([], ["1"], ["2020-01-01"], [""]):
        column = [*others, value, *others]
        for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
            for end, quoting in (("\n", csv.QUOTE_ALL), ("\r\n", csv.QUOTE_MINIMAL)):
                table = io.StringIO()
                how = dict(delimiter=delimiter, lineterminator=end, quoting=quoting)
                out = csv.writer(table, **how)
                out.writerows([["n", "text", "m"], *([7, one, 8] for one in column)])
                if delimiter == "\t" and "\t" in value:
                    assert r"a '\t' inside" in refused(texts, tmp_path / name, table.getvalue())
                else:
                    assert texts(tmp_path / name, table.getvalue()) == column
        for ascii_only in (True, False):
            lines = [json.dumps({"n": 7, "text": one}, ensure_ascii=ascii_only) for one in column]
            for name in ("a.jsonl", "A.NDJSON"):
                assert texts(tmp_path / name, "\n".join(lines)) == column
                assert texts(tmp_path / name, "\r\n".join(lines) + "\r\n") == column
            assert texts(tmp_path / "a.json", f"[{', '.join(lines)}]") == column
    with_line_ends = value.replace("\r\n", "\n").replace("\r", "\n")
    assert texts(tmp_path / "a.txt", "\ufeff" + value) == [with_line_ends]


@pytest.mark.parametrize("written, text", [
    *[(number, number) for number in (
        "1", "1e5", "1E+05", "1.10", "-0", "-0.0", "1" * 5000, "0.1000000000000000055", "1e400")],
    ("NaN", "NaN"), ("-Infinity", "-Infinity"), ("true", "true"), ("false", "false"), ("null", ""),
    (r'"a\ud800b"', "a?b"), (r'"\udf1e"', "?"), (r'"\udf1e\ud83c"', "??")])  # halves of pairs
def test_json_s_values_are_as_they_are_written(tmp_path, written, text):
    """Numbers in any row: the type of a column does not follow from its first rows."""
    line = f'{{"text": {written}, "n": 1}}'
    for before in ('{"text": "a", "n": "b"}', '{"text": 1, "n": 1.5}', '{"text": null}'):
        first = texts(tmp_path / "b.jsonl", before)
        assert texts(tmp_path / "a.jsonl", f"{before}\n{line}\n{before}") == [*first, text, *first]
        assert texts(tmp_path / "a.json", f" [{before},\n{line}]\n") == [*first, text]


@pytest.mark.parametrize("name, content, expected", [
    # a delimiter at the end of the rows, of the header, of both; or too few of them
    ("a.csv", "text,n\nfirst,a,\nsecond,b,\n", ["first", "second"]),
    ("a.csv", "id,text\n1,first,\n2,second,\n", ["first", "second"]),
    ("a.csv", "text,n,,\nfirst,a,,\nsecond,b,,\n", ["first", "second"]),
    ("a.csv", "n,text\n1,first\n2\n3,\n4,second", ["first", "", "", "second"]),
    ("a.csv", "text\nfirst\n\n\nsecond\n\n", ["first", "second"]),  # no rows
    ("a.csv", '\ufefftext,n\r\n"a\r\nb",1\r\n', ["a\r\nb"]),
    ("a.csv", 'text,n\na "b" c,1\n 2" ,2\n', ['a "b" c', ' 2" ']),
    ("a.csv", "text,n\n", []), ("a.csv", "", []),
    # rows of different keys, order, and kinds of values
    ("a.jsonl", '{"text": "a"}\n{"n": 1}\n{"text": null}\n{}\n{"n": {}, "text": "b"}\n',
     ["a", "", "", "", "b"]),
    ("a.jsonl", '{"n": [1], "text": "a"}\n{"text": "b", "n": "x", "more": {"a": 1}}\n', ["a", "b"]),
    ("a.jsonl", '\n \n{"text": "a"}\n\n\t{"text": "b"}\r \n\n', ["a", "b"]),
    ("a.jsonl", '\ufeff{"text": "a"}\r\n{"text": "b"}\n', ["a", "b"]),
    ("a.json", '\ufeff[{"text": "a"}]', ["a"]),
    ("a.jsonl", "\n\n", []), ("a.json", "[]", []),
    ("a.json", '[\n {\n  "text": "a"\n },\n {"n": 1}\n]\n', ["a", ""]),
    ("a.txt", "", [""]), ("a.md", "a\r\nb\rc\n\n", ["a\nb\nc\n\n"]),
    ("a", '{"text": 1}\n', ['{"text": 1}\n']), ("a.csv.txt", "a,b\n", ["a,b\n"])])
def test_rows_are_the_file_s(tmp_path, name, content, expected):
    assert texts(tmp_path / name, content) == expected
    packed = gzip.compress(content.encode())
    assert texts(tmp_path / f"{name}.gz", packed) == expected
    assert texts(tmp_path / f"{name}.GZ".upper(), packed) == expected


@pytest.mark.parametrize("name, content, after, said", [
    ("a.jsonl", '{"text": "a"}\n\n{"text": "b\n{"text": "c"}\n', 1, "control character"),
    ("a.jsonl", b'{"text": "a"}\n' * 9000 + b'{"text": "\xff"}\n', None, "utf-8"),
    ("a.json", '[{"text": "a"},\n {"text": "b"\n}', 0, "Expecting"),
    ("a.csv", 'text,n\na,1\n"b,2\nc,3\n', 1, "unexpected end of data"),
    ("a.csv", "text,n\na,1\nb, c,2\n", 1, "quote it"),
    ("a.csv", "text,n,text\na,1,b\n", 0, "two columns have one name"),
    # quotes as text, which begin and end a field
    ("a.tsv", 'n\ttext\n1\ta\n2\t"b!\n3\tc\n4\td"\n5\te\n', 1, "quote it")])
def test_what_cannot_be_read_is_named(tmp_path, name, content, after, said):
    raw = content if isinstance(content, bytes) else content.encode()
    for path, written in ((tmp_path / name, raw), (tmp_path / f"{name}.gz", gzip.compress(raw))):
        found = refused(texts, path, written)
        assert found.startswith(f"{path}, after row {'' if after is None else after}")
        assert said in found and "\n" not in found


def test_parquet_keeps_its_types(tmp_path):
    """Its columns have them: nothing is guessed. Names of files are no patterns. A file without
    rows, as Spark writes them, is skipped."""
    datasets = pytest.importorskip("datasets")
    column = ["007", "NA", "2020-01-01", " a ", "a\r\nb", "\u2028", "", None, "x" * 200_000]
    data = {"a[1]": {"text": column, "n": range(9)}, "a1": {"text": ["b"], "n": [0]}}
    for name, columns in data.items():
        datasets.Dataset.from_dict(columns).to_parquet(tmp_path / f"{name}.parquet")
    found = [*rows(f"{tmp_path}/a[1].parquet", "validation", subset=None)]
    assert found == [{"text": text, "n": n} for n, text in enumerate(column)]
    pyarrow = pytest.importorskip("pyarrow.parquet")
    pyarrow.write_table(pyarrow.read_table(tmp_path / "a1.parquet")[:0], tmp_path / "0.parquet")
    args = SimpleNamespace(source=[f"{tmp_path}/0.parquet", f"{tmp_path}/a1.parquet"], subset=None)
    assert [*documents(args, "train", lambda row, where: row)] == [{"text": "b", "n": 0}]
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    args.source = [f"{tmp_path}/b.parquet"]
    assert "b.parquet, after row 0: " in refused(lambda: [*documents(args, "train", dict.get)])
