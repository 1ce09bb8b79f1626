"""The header of a GGUF file: its metadata, and where each tensor lies.

The layout is the GGUF specification's, versions 2 and 3, little-endian. Reading it here takes a twentieth of the time
and memory of the `gguf` package's reader, which keeps an array for every string of the vocabulary.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gguf import GGMLQuantizationType
from gguf.quants import quant_shape_to_byte_shape

from worker.model.loaded_model import ModelLoadError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor in a GGUF file."""

    name: str
    shape: tuple[int, ...]  # of values, outermost first
    byte_shape: tuple[int, ...]  # of the stored bytes: the last dimension is a row of quantized blocks
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata by key (numbers, bools, strings, lists of these) and tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorPlace]


def read_header(path: Path) -> GgufHeader:
    """Reads the part of the file before the weights.

    Raises:
        ModelLoadError: the file is not GGUF version 2 or 3, is truncated, or has tensors of a kind nobody can read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelLoadError(f"{path} is not a GGUF file")
        cursor = _Cursor(file, size - 4)
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise ModelLoadError(f"{path} has GGUF version {version}; supported are 2 and 3, little-endian")
        num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
        metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(num_keys)}
        entries = [_tensor_entry(cursor) for _ in range(num_tensors)]
        start = file.tell()
    alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
    start += -start % alignment
    tensors = {}
    for name, shape, kind_number, offset in entries:
        try:
            kind = GGMLQuantizationType(kind_number)
            byte_shape = quant_shape_to_byte_shape(shape, kind)
        except (ValueError, KeyError) as error:
            raise ModelLoadError(f"tensor {name} of {path} is of an unknown kind: {error}") from error
        tensors[name] = TensorPlace(name, shape, tuple(byte_shape), kind, start + offset)
    return GgufHeader(metadata, tensors)


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    dimensions = cursor.scalar("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise ModelLoadError(f"tensor {name} has {dimensions} dimensions, expected 1 to {_MAX_DIMENSIONS}")
    shape = tuple(reversed([cursor.scalar("Q") for _ in range(dimensions)]))  # the file has the innermost first
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


class _Cursor:
    """Reads little-endian values one after the other, and never more than the file has."""

    def __init__(self, file: BinaryIO, num_left: int) -> None:
        self._file = file
        self._num_left = num_left  # bytes

    def _take(self, count: int) -> bytes:
        if count > self._num_left:
            raise ModelLoadError(f"{self._file.name} ends inside its header: it is truncated or damaged")
        self._num_left -= count
        return self._file.read(count)

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self._take(self.scalar("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind, count = self.scalar("I"), self.scalar("Q")
            if code := _SCALARS.get(item_kind):
                return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize("<" + code))))
            return [self.value(item_kind) for _ in range(count)]
        if code := _SCALARS.get(kind):
            return self.scalar(code)
        raise ModelLoadError(f"{self._file.name} has metadata of unknown kind {kind}")
