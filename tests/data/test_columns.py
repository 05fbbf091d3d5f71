"""Parquet and dataset rows: which columns are read, in which memory, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from helpers import ROOT, texts_of

from engine.core.errors import UserError
from engine.data.inputs import columns, readers
from engine.data.inputs.columns import count_parts
from engine.data.inputs.finder import find_sources
from engine.data.inputs.readers import read
from engine.data.inputs.sources import Source

DAY_AFTER_YEAR_9999 = pyarrow.array([10**7], pyarrow.int32()).cast(pyarrow.date32())
TWO_FIELDS_OF_ONE_NAME = pyarrow.StructArray.from_arrays(
    [pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"]
)


def write(path: Path, table: Any, **options: Any) -> Path:
    pyarrow.parquet.write_table(table, path, **options)
    return path


def turns_of(record: dict[str, Any], names: str = "prompt completion") -> list[tuple[str, str]]:
    """Return the columns that are there, as turns."""
    return [(name, record[name]) for name in names.split() if record.get(name) is not None]


EXAMPLE = {"prompt": ["p"], "completion": ["c"]}


# Columns.


@pytest.mark.parametrize("column", [DAY_AFTER_YEAR_9999, TWO_FIELDS_OF_ONE_NAME])
@pytest.mark.parametrize("kind", ["parquet", "saved", "streamed"])
def test_a_column_that_no_field_names_is_not_read(column, kind, tmp_path: Path):
    table = pyarrow.table(EXAMPLE | {"other": column})
    if kind == "saved":
        datasets = pytest.importorskip("datasets")
        if pyarrow.types.is_struct(column.type):
            pytest.skip("a dataset has no two fields of one name")
        datasets.Dataset(table).save_to_disk(tmp_path)
    else:
        write(tmp_path / "a.parquet", table)
    name = f"{tmp_path}/a.parquet" if kind == "parquet" else f"hf:{tmp_path}"
    (source,) = find_sources((name,), tmp_path)
    for fields in (("prompt", "completion"), ("completion", "absent", "prompt")):
        if kind == "streamed" and "absent" in fields:
            continue
        texts = texts_of(source, turns_of=turns_of, fields=fields)
        assert [json.loads(text) for text in texts] == [[["prompt", "p"], ["completion", "c"]]]


@pytest.mark.parametrize("field", ["text", "text.en", "en"])
def test_a_column_is_named_exactly(field: str, tmp_path: Path):
    nested = [{"text": "nested", "en": "nested"}]
    table = pyarrow.table({"s": nested, "text.en": ["dotted"], "text": ["plain"], "en": ["short"]})
    expected = {"text": "plain", "text.en": "dotted", "en": "short"}
    assert texts_of(write(tmp_path / "a.parquet", table), field=field) == [expected[field]]


@pytest.mark.parametrize("settings", [{}, {"turns_of": turns_of, "fields": ("text",)}])
def test_two_columns_of_one_name_are_refused_if_they_are_needed(settings, tmp_path: Path):
    arrays = [pyarrow.array([value]) for value in "abc"]
    path = write(tmp_path / "a.parquet", pyarrow.table(arrays, names=["text", "other", "other"]))
    assert len(texts_of(path, **settings)) == 1
    write(path, pyarrow.table(arrays, names=["text", "other", "text"]))
    with pytest.raises(UserError, match=r"^a\.parquet: .*'text'"):
        texts_of(path, **settings)
    write(path, pyarrow.table(arrays, names=["prompt", "other", "other"]))
    with pytest.raises(UserError, match=r"^a\.parquet: .*'other'"):
        texts_of(path, turns_of=turns_of, fields=("prompt", "other"))


# Types.


@pytest.mark.parametrize(
    ("column", "row", "word", "num_good"),
    [
        (pyarrow.array([["a"], ["b"]]), 1, "'text'", 0),
        (pyarrow.array([b"a", b"b\xff"]).view(pyarrow.string()), 2, "UTF-8", 1),
        (pyarrow.array([10**7], pyarrow.int32()).cast(pyarrow.date32()), 1, "out of range", 0),
    ],
)
def test_an_unsuitable_value_is_located_and_can_be_skipped(column, row, word, num_good, tmp_path):
    path = write(tmp_path / "a.parquet", pyarrow.table({"text": column}))
    with pytest.raises(UserError, match=f"^a.parquet, row {row}: .*{word}"):
        texts_of(path)
    assert texts_of(path, skip_bad_rows=True) == ["a", "b"][:num_good]


def test_empty_row_groups_and_files_have_no_records(tmp_path: Path):
    schema = pyarrow.schema({"text": pyarrow.string()})
    with pyarrow.parquet.ParquetWriter(tmp_path / "a.parquet", schema) as writer:
        for texts in ([], ["a"], [], ["b", "c"], []):
            writer.write_table(pyarrow.table({"text": texts}, schema))
    source = Source(tmp_path / "a.parquet", "a.parquet")
    assert texts_of(source.path) == ["a", "b", "c"]
    num_parts = count_parts(source, 1)
    parts = [[text.text for text in read(source, n, num_parts)] for n in range(num_parts)]
    assert [text for part in parts for text in part] == ["a", "b", "c"] and [] in parts
    write(source.path, pyarrow.table({"text": []}))
    assert texts_of(source.path) == []


# Memory.

MEASURE = """
import re, sys
from pathlib import Path
from engine.data.inputs.readers import read
from engine.data.inputs.sources import ExampleParser, Reader, Source

def parse(record):
    return [("user", record["text"])], []

is_chat = sys.argv[2] == "chat"
parser = ExampleParser(parse, ("text",))
reader = Reader(examples=parser if is_chat else None)
print(sum(len(text.text) for text in read(Source(Path(sys.argv[1]), "a"), reader=reader)))
print(re.search("VmHWM: *(.*) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="measures memory in /proc")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("text", {}),
        ("chat", {}),
        ("text", {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}),
    ],
)
def test_memory_is_that_of_a_few_cells(kind: str, options: dict, tmp_path: Path):
    table = pyarrow.table({"text": ["a text of words " * 2**16] * 64})
    path = write(tmp_path / "a.parquet", table, **options)
    assert path.stat().st_size < 2**17
    command = [sys.executable, "-c", MEASURE, path, kind]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    num_read, peak_kilobytes = map(int, result.stdout.split())
    assert num_read >= 2**26 and peak_kilobytes < 170_000  # 70,000 before it reads


def test_the_rows_of_a_large_batch_are_the_same(tmp_path: Path, monkeypatch):
    texts = [f"text {number} " * number for number in range(100)]
    path = write(tmp_path / "a.parquet", pyarrow.table({"text": texts}))
    monkeypatch.setattr(columns, "LARGE_BATCH_BYTES", 2000)
    monkeypatch.setattr(readers, "LARGE_DOCUMENT_BYTES", 2**20)
    assert texts_of(path) == texts
