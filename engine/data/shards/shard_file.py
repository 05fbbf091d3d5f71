"""Files of shards: one-dimensional arrays as NumPy saves them, written piece by piece or mapped."""

import io
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.core import files
from engine.core.errors import UserError

SHARD_HEADER_BYTES = 128  # NumPy's header with room for an array of any length


def make_shard_header(dtype: np.dtype, num_tokens: int) -> bytes:
    """Return NumPy's header of a shard, which np.save() writes too."""
    file = io.BytesIO()
    header = {"descr": dtype.str, "fortran_order": False, "shape": (num_tokens,)}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue()


class ShardWriter:
    """Writes a shard piece by piece: a one-dimensional array, as NumPy saves it."""

    def __init__(self, path: Path):
        self.path = path
        self.num_tokens = 0
        self.file = io.BufferedWriter(files.NamedFile(path, "wb"))
        self.file.seek(SHARD_HEADER_BYTES)

    def write(self, values: np.ndarray) -> None:
        """Append values, ids or lengths (N,), whose dtype must not change between calls."""
        self.file.write(values.data)
        self.dtype = values.dtype
        self.num_tokens += len(values)

    def close(self) -> list[dict[str, Any]]:
        """Complete the file, and return its entry in the manifest; an empty file is removed."""
        if not self.num_tokens:
            self.file.close()
            self.path.unlink()
            return []
        self.file.seek(0)
        self.file.write(make_shard_header(self.dtype, self.num_tokens))
        assert self.file.tell() == SHARD_HEADER_BYTES
        self.file.close()
        files.fsync(self.path)
        name = self.path.name
        return [{"file": name, "tokens": self.num_tokens, "sha256": files.sha256(self.path)}]


class ShardedTokens:
    """Several arrays, read as one by slices."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self.arrays = arrays
        self.starts = np.cumsum([0] + [len(array) for array in arrays]).tolist()

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, _ = span.indices(len(self))
        touched = slice(bisect_right(self.starts, start) - 1, bisect_left(self.starts, stop))
        arrays = zip(self.arrays[touched], self.starts[touched], strict=True)
        slices = [array[max(0, start - offset) : stop - offset] for array, offset in arrays]
        if len(slices) == 1:
            return slices[0]
        return np.concatenate(slices or [np.empty(0, np.uint16)])


def open_shards(folder: Path, shards: list[dict[str, Any]], dtype: str) -> ShardedTokens:
    """Map shards into memory. Raises UserError or OSError unless they match the manifest."""
    arrays = []
    for shard in shards:
        path = files.safe_child_path(folder, shard["file"])
        header = make_shard_header(np.dtype(dtype), shard["tokens"])
        num_bytes = len(header) + shard["tokens"] * np.dtype(dtype).itemsize
        with open(path, "rb") as file:  # NumPy's parser of headers may raise anything
            files.check_pointer(file.peek(), path)
            if file.read(len(header)) != header or path.stat().st_size != num_bytes:
                raise UserError(f"{path.name} is not a shard of {shard['tokens']} {dtype}")
        arrays.append(np.load(path, mmap_mode="r"))
    return ShardedTokens(arrays)
