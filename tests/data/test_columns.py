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
from engine.data.inputs.finder import find_sources

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


def test_two_columns_of_one_name_are_refused_if_they_are_needed(tmp_path: Path):
    arrays = [pyarrow.array([value]) for value in "abc"]
    path = write(tmp_path / "a.parquet", pyarrow.table(arrays, names=["text", "other", "other"]))
    assert texts_of(path) == ["a"]
    with pytest.raises(UserError, match=r"^a\.parquet: .*'other'"):
        texts_of(path, turns_of=turns_of, fields=("text", "other"))


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
