"""
Text is what the file says (data/documents.py): every way is tried in which a reader could change
a value, lose a row or move a column; and an error names the line of the file.

    python -m pytest -q tests/test_documents.py
"""

import csv
import gzip
import io
import json
import random
import sys
from types import ModuleType, SimpleNamespace

import pytest
from harness import refused

from data.documents import documents, render, rows

NULL = "\\N"  # null, or not there, in the tables below


def read(path, column="text", split="train", **args):
    """The values of a column, in a file's order."""
    args = SimpleNamespace(subset=None, column=column, **args)
    return [row[column] for _, row in rows(str(path), split, args)]


def texts(path, content, template="{text}", limit=sys.maxsize):
    """What becomes of the rows of a file with this content (in bytes, or else in UTF-8)."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    args = SimpleNamespace(source=[str(path)], subset=None, column="text")
    return [*documents(args, "train", lambda *row: render(template, *row), limit)]


# What a reader that guesses takes for a number, a date, a truth value or nothing.
GUESSED = [
    "007", "1e5", "1E5", "1.10", "+1", "-0", ".5", "1_000", "0x10", "1,5", "1 000", "\u0661",
    "12345678901234567890123", "0.1000000000000000055511151231257827", "1" * 5000,
    "NA", "N/A", "n/a", "null", "NULL", "None", "nan", "NaN", "-inf", "Infinity", "#N/A", "<NA>",
    "true", "False", "yes", "T",
    "2020-01-01", "2020-01-01T10:00:00", "2020-01-01T10:00:00Z", "10:00", "01/02/03",
    " before", "after ", "\ttab\t", "\u00a0nbsp\u00a0", "  ", "#comment", "'quoted'", "=1+1", "\\n",
    "a\\", "\\", "a\u2028b\u2029c", "a\u0085b", "a\x0bb\x0cc\x1cd\x1ee", "\x1a", "\ufeff",
    "\U0001f31e", "e\u0301", "\u00e9", "\ufffd", "x" * 200_000]
QUOTED = ['"', '""', 'say "a"', "a,b", "a\tb", "a\nb", "a\r\nb", "a\rb", "\n", '"\n"', ",", '","']


@pytest.mark.parametrize("value", GUESSED + QUOTED, ids=lambda value: ascii(value)[:30])
def test_a_value_is_the_file_s_in_every_format(tmp_path, value):
    """Alone, and between values of another kind, whose type or length it does not take. (In a
    .tsv a tab inside quotes is refused: in many of them quotes are text.)"""
    for others in ([], ["1"], ["1.5", "x"], ["2020-01-01"], ["true"], [""]):
        column = [*others, value, *others]
        for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
            for end, quoting in (("\n", csv.QUOTE_ALL), ("\r\n", csv.QUOTE_MINIMAL)):
                table = io.StringIO()
                how = dict(delimiter=delimiter, lineterminator=end, quoting=quoting)
                out = csv.writer(table, **how)
                out.writerows([["n", "text", "m"], *([7, one, 8] for one in column)])
                if delimiter == "\t" and "\t" in value:
                    assert "a tab inside" in refused(texts, tmp_path / name, table.getvalue())
                else:
                    assert texts(tmp_path / name, table.getvalue()) == column
        for ascii_only in (True, False):
            lines = [json.dumps({"n": 7, "text": one}, ensure_ascii=ascii_only) for one in column]
            for name in ("a.jsonl", "A.NDJSON", "a.json"):
                assert texts(tmp_path / name, "\n".join(lines)) == column
                assert texts(tmp_path / name, "\r\n".join(lines) + "\r\n") == column
            assert texts(tmp_path / "a.json", f"[{', '.join(lines)}]") == column
    assert texts(tmp_path / "a.txt", "\ufeff" + value) == [re_ended(value)]


def re_ended(text):
    """With the line ends of a text file."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


@pytest.mark.parametrize("written, text", [
    *[(number, number) for number in (
        "1", "1e5", "1E+05", "1.10", "-0", "-0.0", "1" * 5000, "0.1000000000000000055", "1e400")],
    ("NaN", "NaN"), ("-Infinity", "-Infinity"), ("true", "true"), ("false", "false"), ("null", ""),
    (r'"\u00e9"', "\u00e9"), (r'"\ud83c\udf1e"', "\U0001f31e"), (r'"\/\b"', "/\b"),
    (r'"a\ud800b"', "a?b"), (r'"\udf1e"', "?"), (r'"\udf1e\ud83c"', "??"),  # halves of pairs
    (r'"\u0000"', "\0"), (r'"a\nb"', "a\nb")])
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
    ("a.tsv", "text\tn\nfirst\ta\t\nsecond\tb\t\t\n", ["first", "second"]),
    ("a.csv", "text,n,,\nfirst,a,,\nsecond,b,,\n", ["first", "second"]),
    ("a.csv", ",text\n0,first\n1,second\n", ["first", "second"]),  # of pandas, with an index
    ("a.csv", "n,text\n1,first\n2\n3,\n4,second", ["first", "", "", "second"]),
    ("a.csv", "text\nfirst\n\n\nsecond\n\n", ["first", "second"]),  # no rows
    ("a.csv", "\n\ntext\nfirst\n", ["first"]),
    ("a.csv", '\ufefftext,n\r\n"a\r\nb",1\r\n', ["a\r\nb"]),
    ("a.csv", '\ufeff"text"\nfirst\n', ["first"]),
    ("a.csv", 'text,n\na "b" c,1\n 2" ,2\n', ['a "b" c', ' 2" ']),
    ("a.csv", "text\n" + "a" * 131_073 + '\n"' + "b" * 300_000 + '"\n',
     ["a" * 131_073, "b" * 300_000]),
    ("a.csv", "text,n\n", []), ("a.csv", "text", []), ("a.csv", "", []), ("a.csv", "\n", []),
    ("a.tsv", "text\tn\na,b;c|d\t1\n", ["a,b;c|d"]),
    # rows of different keys, order, and kinds of values
    ("a.jsonl", '{"text": "a"}\n{"n": 1}\n{"text": null}\n{}\n{"n": {}, "text": "b"}\n',
     ["a", "", "", "", "b"]),
    ("a.jsonl", '{"n": [1], "text": "a"}\n{"text": "b", "n": "x", "more": {"a": 1}}\n', ["a", "b"]),
    ("a.jsonl", '\n \n{"text": "a"}\n\n\t{"text": "b"}\r \n\n', ["a", "b"]),
    # with a mark, as each of several files that are joined has it
    ("a.jsonl", '\ufeff{"text": "a"}\r\n\ufeff{"text": "b"}\n', ["a", "b"]),
    ("a.csv", "\ufefftext,n\na,1\n\ufeffb,2\n", ["a", "b"]),
    ("a.txt", "\ufeffa\n\ufeffb\n", ["a\nb\n"]), ("a.json", '\ufeff[{"text": "a"}]', ["a"]),
    ("a.jsonl", "", []), ("a.json", "[]", []), ("a.jsonl", "\n\n", []),
    ("a.json", '[\n {\n  "text": "a"\n },\n {"n": 1}\n]\n', ["a", ""]),
    ("a.txt", "", [""]), ("a.md", "a\r\nb\rc\n\n", ["a\nb\nc\n\n"]),
    ("a", "text\n1\n", ["text\n1\n"]), ("a.csv.txt", "a,b\n", ["a,b\n"]),
    # JSON of another name, and text that only looks a little like it
    ("a.jl", '{"n": 1, "text": "a"}\n{"text": "b"}\n', ["a", "b"]),
    ("a.jsonlines", '{"text": "a"}', ["a"]), ("a.JL", '{"text": 1}', ["1"]),
    ("part-00000", '{"text": "a"}\r\n{"text": "b"}\r\n', ["a", "b"]),
    ("a.json.txt", '\ufeff\n { "text": "{}" }\n', ["{}"]), ("a.log", '[{"text": "a"}]', ["a"]),
    ("a.log", '[{"text": "a"},\n{"text": "b"}\n]\n', ["a", "b"]),
    ("a.log", ' [\n{"text": "a"},\n{"text": "b"}\n]\n', ["a", "b"]),
    ("a.txt", "{}\n", ["{}\n"]), ("a.txt", "{a} [b]", ["{a} [b]"]), ("a.txt", "[1]", ["[1]"]),
    ("a.ipynb", '{\n "cells": []\n}\n', ['{\n "cells": []\n}\n']),
    ("a.txt", 'x {"text": "a"}\n', ['x {"text": "a"}\n'])])
def test_rows_are_the_file_s(tmp_path, name, content, expected):
    assert texts(tmp_path / name, content) == expected
    packed = gzip.compress(content.encode())
    assert texts(tmp_path / f"{name}.gz", packed) == expected
    assert texts(tmp_path / f"{name}.GZ".upper(), packed) == expected


LATE = [{"text": "a" * 2000, "n": i} for i in range(6000)]  # 12 MB: more than one block of pyarrow


@pytest.mark.parametrize("last", [
    {"text": "late", "n": "x"}, {"text": "late", "n": 1.5}, {"text": "late", "n": None},
    {"text": "late", "n": 1, "more": {"a": [1]}}, {"text": "late"}, {"n": [], "text": "late"}])
def test_a_column_or_type_that_comes_late_changes_nothing(tmp_path, last):
    rows = "".join(json.dumps(row) + "\n" for row in [*LATE, last])
    found = texts(tmp_path / "a.jsonl", rows)
    assert len(found) == 6001 and found[-1] == "late" and {*found[:-1]} == {"a" * 2000}


def test_dates_and_numbers_in_a_template_are_text(tmp_path):
    rows = '{"date": "2020-01-01", "text": 7}\n{"date": "2020-01-02T10:00:00", "text": null}\n'
    found = texts(tmp_path / "a.jsonl", rows, "{date}: {text}.")
    assert found == ["2020-01-01: 7.", "2020-01-02T10:00:00: ."]
    # What a value says is no template, and no pattern.
    found = texts(tmp_path / "a.csv", "a,text\n{text},\\1\n", "{a} {text} {")
    assert found == [r"{text} \1 {"]


def test_a_column_of_a_file_without_columns_is_refused(tmp_path):
    """Whatever its name; JSON of any name has them."""
    for name in ("a.txt", "a.md", "part-00000"):
        path = tmp_path / name
        path.write_text("a,body\n1,x\n")
        line = refused(read, path, "body")
        assert f"{path}: --column=body" in line and ".jsonl" in line
        assert read(path) == ["a,body\n1,x\n"]
        path.write_text('{"body": "x", "text": "y"}\n')
        assert read(path, "body") == ["x"] and read(path) == ["y"]
        path.write_text('{"body": "x"}\n')
        assert "here body" in refused(texts, path, path.read_bytes())


@pytest.mark.parametrize("name, content, line, said", [
    ("a.jsonl", '{"text": "a"}\n\n{"text": "b\n{"text": "c"}\n', 3, "column 10: Unterminated"),
    ("a.jsonl", '{"text": "a"}\n{"text": "a"} {"text": "b"}\n', 2, "column 15: Extra data"),
    ("a.jsonl", '{"text": "a"}\n{"text": "a", "text": "b"}\n', 2, "has a key twice"),
    ("a.jsonl", '{"text": "a"}\n{"text": {"b": 1, "b": 2}}\n', 2, "no text in column text"),
    ("a.jsonl", '{"text": "a"}\n["b"]\n', 2, "is no object"),
    ("a.jsonl", '{"text": "a"}\n"b"\n', 2, "is no object"),
    ("a.jsonl", '{"text": "a"}\n3\n', 2, "is no object"),
    ("a.jsonl", '{"text": "a"}\nnull\n', 2, "is no object"),
    ("a.jsonl", '{"text": "a"}\n{"text": ["b"]}\n', 2, "some, here none"),
    ("a.jsonl", '{"text": "a"}\n{"text": ["b"], "n": 1}\n', 2, "here n"),
    ("a.jsonl", '{"body": "a"}\n{"text": "b"}\n', 1, "no text in column text; pass"),
    ("a.jsonl", '{"text": 1}\n{"text": 01}\n', 2, "mend the line"),
    ("a.jsonl", '{"text": "a"}\n' * 9000 + "{", 9001, "mend the line"),
    ("a.jsonl", b'{"text": "a"}\n' * 9000 + b'{"text": "\xff"}\n', 9001, "not UTF-8"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xed\xa0\x80"}\n', 2, "not UTF-8"),  # half a pair
    ("a.jsonl", '{"text": "\u00e9"}\n'.encode("utf-16"), 1, "not UTF-8"),
    ("a.jsonl", '{"text": "a"}\n'.encode("utf-16-be"), 1, "iconv -f UTF-16LE, or BE,"),
    ("a.txt", "a\nb".encode("utf-16-le"), 1, "NUL"), ("a.csv", "a\n\0", 2, "NUL"),
    ("a.jsonl", '{"text": "a"}\n{\n  "text": "b"\n}\n', 2, "column 2: Expecting"),
    ("a.json", '[{"text": "a"},\n {"text": "b"\n}', 3, "column 2: Expecting"),
    ("a.json", '[{"text": "a"},\n{"text": "b"}]\n[{"text": "c"}]', 3, "Extra data"),
    ("a.csv", 'text,n\na,1\n"b,2\nc,3\n', 3, "unexpected end of data, in the row that begins"),
    ("a.csv", 'text,n\n"a\n\nb",1\n"c" d,2\n', 5, "quotes"),
    ("a.csv", "text,n\na,1\nb, c,2\n", 3, "3 fields for 2 columns"),
    ("a.csv", 'text,n\n"a\nb",1\n\nb,2,,3\n', 5, "4 fields for 2 columns"),
    ("a.tsv", "text\nb\tc\n", 2, "2 fields for 1 columns, ['text']"),
    ("a.csv", "text,n,text\na,1,b\n", 1, "same name"),
    # CR in a text that Python before 3.13 writes without quotes; as the line ends of an old Mac
    ("a.csv", "text,n\na,1\nb\rc,2\n", 3, "unquoted field, in the row that begins"),
    ("a.csv", "text\rfirst\rsecond\r", 1, "a lone CR is one"),
    ("a.csv", "\nbody,n\na,1\n", 3, "no text in column text; pass --column or --template for one "
     "that has some, here body, n"),
    # columns that something else separates
    ("a.csv", "text;n\na;1,5\n", 2, "2 fields for 1 columns, ['text;n']"),
    ("a.csv", "text\tn\na\t1\n", 2, "here text\tn"), ("a.tsv", "text|n\na|1\n", 2, "here text|n"),
    # quotes as text, which begin and end a field
    ("a.tsv", 'n\ttext\n1\ta\n2\t"b!\n3\tc\n4\td"\n5\te\n', 3, "a tab inside a field"),
    ("a.tsv", '"n\ttext\n1\ta"\n', 1, "a tab inside a field"),
    ("a.csv", b"text\n" + b"a\n" * 9000 + b"\xff\n", 9002, "not UTF-8"),
    ("a.csv", b"text\na\n\xffb\n", 3, "not UTF-8"),
    ("a.txt", b"a\n" * 9000 + b"b\xe9\n", 9001, "not UTF-8"),
    ("a.txt", b"a\rb\r\nc\xff", 3, "not UTF-8"), ("a.txt", b"\xc3", 1, "not UTF-8")])
def test_what_cannot_be_read_is_named_by_its_line(tmp_path, name, content, line, said):
    """The rows before it are read: nothing is lost when it is mended."""
    found = refused(texts, tmp_path / name, content)
    assert found.startswith(f"{tmp_path / name}: line {line}") and said in found
    raw = content if isinstance(content, bytes) else content.encode()
    found = refused(texts, tmp_path / f"{name}.gz", gzip.compress(raw))
    assert found.startswith(f"{tmp_path / name}.gz: line {line}") and said in found


def test_a_row_of_an_array_is_named_by_its_number(tmp_path):
    content = '[\n{"text": "a"},\n\n{"text": []}]'
    assert f"{tmp_path}/a.json: row 2: no text" in refused(texts, tmp_path / "a.json", content)
    content = '[{"text": "a"}, 3]'
    assert "row 2: 3 is no object" in refused(texts, tmp_path / "a.json", content)


def test_a_packed_file_that_is_not_whole_is_refused(tmp_path):
    packed = gzip.compress(b"text\n" + random.Random(0).randbytes(9999).hex().encode())
    for content, said in ((packed[:-20], "must be whole"), (b"text\na\n", "must be whole")):
        line = refused(texts, tmp_path / "a.csv.gz", content)
        assert f"{tmp_path}/a.csv.gz: " in line and said in line


def test_a_limit_reads_no_further(tmp_path):
    """Rows without text do not count, and what follows may be broken."""
    content = '{"text": "a"}\n{"text": null}\n{"text": "b"}\n{'
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    args = SimpleNamespace(source=[str(path)], subset=None, column="text")
    found = documents(args, "train", lambda *row: render("{text}", *row) or None, limit=2)
    assert [*found] == ["a", None, "b"]


def test_any_table_comes_back_as_it_was_written(tmp_path):
    """Random ones, by csv's and json's own writers."""
    draw = random.Random(0)
    for _ in range(200):
        column = ["".join(draw.choices('a1", \t\r\n\\\'\u00e9\u2028', k=draw.randrange(6)))
                  for _ in range(draw.randrange(1, 6))]
        table = io.StringIO()
        csv.writer(table).writerows([["n", "text"], *([1, one] for one in column)])
        assert texts(tmp_path / "a.csv", table.getvalue()) == column
        lines = "\n".join(json.dumps({"text": one}) for one in column)
        assert texts(tmp_path / "a.jsonl", lines) == column


def test_parquet_keeps_its_types(tmp_path, capsys):
    """Its columns have them: nothing is guessed. Names of files are no patterns. A file without
    rows, as Spark writes them, is skipped."""
    datasets = pytest.importorskip("datasets")
    column = ["007", "NA", "2020-01-01", " a ", "a\r\nb", "\u2028", "", None, "x" * 200_000]
    data = {"a[1]": {"text": column, "n": range(9)}, "a1": {"text": ["b"], "n": [0]}}
    for name, columns in data.items():
        datasets.Dataset.from_dict(columns).to_parquet(tmp_path / f"{name}.parquet")
    assert read(tmp_path / "a[1].parquet") == column
    assert read(tmp_path / "a[1].parquet", "n") == [*range(9)]
    pyarrow = pytest.importorskip("pyarrow.parquet")
    pyarrow.write_table(pyarrow.read_table(tmp_path / "a1.parquet")[:0], tmp_path / "0.parquet")
    args = SimpleNamespace(source=[f"{tmp_path}/0.parquet", f"{tmp_path}/a1.parquet"], subset=None)
    assert [*documents(args, "train", lambda row, where: row)] == [{"text": "b", "n": 0}]
    assert capsys.readouterr().out == f"{tmp_path}/0.parquet: it has no rows\n"
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    assert "b.parquet: " in refused(read, tmp_path / "b.parquet")


def test_datasets_is_imported_for_parquet_and_the_hub_alone(tmp_path, monkeypatch):
    asked = []

    def load_dataset(path, **options):
        asked.append((path, options["split"], options.get("name")))
        return [{"text": f"{path} {options['split']}"}]

    fake = ModuleType("datasets")
    fake.load_dataset = load_dataset
    fake.logging = SimpleNamespace(set_verbosity=print, CRITICAL=50)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    for name in ("a.jsonl", "a.csv", "a.txt"):
        texts(tmp_path / name, "")
    assert asked == []
    assert read("owner/name", split="validation") == ["owner/name validation"]
    (tmp_path / "a.parquet").touch()
    assert read(tmp_path / "a.parquet", split="validation") == ["parquet train"]
    assert asked == [("owner/name", "validation", None), ("parquet", "train", None)]
    monkeypatch.setitem(sys.modules, "datasets", None)  # it is not installed
    for source in ("owner/name", tmp_path / "a.parquet"):
        assert refused(read, source).endswith("; pip install datasets")
