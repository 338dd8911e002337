"""Read a file in IDX format, plain or gzipped, and check it before use.

Source: LeCun, Cortes, Burges, The MNIST database, the section on file formats.

    00 00   08           03                 60,000 × 28 × 28           the values
            unsigned     number of          sizes, 4 bytes each,
            bytes        dimensions         the most significant first

If a file doesn't match its header, the error says so in a sentence that names it.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from pathlib import Path
from typing import IO, cast

import numpy as np

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

MAX_BYTES = (
    1 << 30
)  # 20 times MNIST: a header that promises more is taken for a mistake
_GZIP = b"\x1f\x8b"
_UNSIGNED = 0x08
_OTHER_TYPES = {
    0x09: "signed bytes",
    0x0B: "16-bit integers",
    0x0C: "32-bit integers",
    0x0D: "float32",
    0x0E: "float64",
}
_KINDS = {1: "labels", 3: "images"}


class IdxError(ValueError):
    """We can't use a file of images or labels; the message names it and says why."""


def read_idx(path: Path, num_dims: int, *, sha256: str = "") -> Bytes:
    """Read an IDX file of unsigned bytes with `num_dims` dimensions.

    With `sha256`, the unpacked bytes of the whole file must have that checksum.

    Raises:
        IdxError: we can't read the file, or it isn't what it should be.
    """
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "is not there"
        raise IdxError(f"{path} {what}")
    try:
        with _opened(path) as file:
            header, sizes = _header(path, file, num_dims)
            body = file.read(math.prod(sizes) + 1)  # one more would be one too many
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise IdxError(
            f"{path} can't be unpacked because it is cut short or damaged: {error}"
        ) from error
    except OSError as error:
        raise IdxError(f"{path} cannot be read: {error.strerror or error}") from error
    _check_length(path, sizes, len(body))
    _check_sum(path, header + body, sha256)
    return np.frombuffer(bytearray(body), dtype=np.uint8).reshape(sizes)


def content_of(path: Path) -> bytes:
    """Return a file's unpacked bytes, or b"" if we can't read or unpack it."""
    try:
        with _opened(path) as file:
            return file.read(MAX_BYTES)
    except (OSError, EOFError, zlib.error, IdxError):
        return b""


def _opened(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        start = file.read(2)
    if not start:
        raise IdxError(f"{path} is empty")
    # By its content, not by its name: browsers unpack files and keep the ".gz".
    is_packed = start == _GZIP
    return cast("IO[bytes]", gzip.open(path) if is_packed else path.open("rb"))


def _header(path: Path, file: IO[bytes], num_dims: int) -> tuple[bytes, list[int]]:
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0":
        raise IdxError(
            f"{path} is not an IDX file: it begins with "
            f"{magic.hex(' ') or 'nothing'}, but IDX begins with 00 00"
        )
    if magic[2] != _UNSIGNED:
        held = _OTHER_TYPES.get(magic[2], f"values of the unknown type {magic[2]:#04x}")
        raise IdxError(f"{path} holds {held}, not unsigned bytes")
    if magic[3] != num_dims:
        raise IdxError(
            f"{path} holds {_kind(magic[3])}, but it should hold {_kind(num_dims)}"
        )
    sizes = file.read(4 * num_dims)
    if len(sizes) < 4 * num_dims:
        raise IdxError(f"{path} is cut short: it ends within its header")
    counts = list(struct.unpack(f">{num_dims}I", sizes))
    if not 0 < math.prod(counts) <= MAX_BYTES:
        raise IdxError(f"{path} says that it holds {_product(counts)} bytes")
    return magic + sizes, counts


def _check_length(path: Path, sizes: list[int], length: int) -> None:
    promised = math.prod(sizes)
    if length < promised:
        raise IdxError(
            f"{path} is cut short: its header promises {_product(sizes)} bytes, but it "
            f"has only {length:,} of {promised:,}"
        )
    if length > promised:
        raise IdxError(
            f"{path} is longer than its header promises: {_product(sizes)} bytes"
        )


def _check_sum(path: Path, content: bytes, sha256: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if sha256 and found != sha256:
        raise IdxError(
            f"{path} doesn't have the right content: unpacked, its SHA-256 is "
            f"{found[:12]}…, but it should be {sha256[:12]}…"
        )


def _kind(num_dims: int) -> str:
    plural = "dimension" if num_dims == 1 else "dimensions"
    name = _KINDS.get(num_dims)
    counted = f"{num_dims} {plural}"
    return f"{name} ({counted})" if name else f"values in {counted}"


def _product(sizes: list[int]) -> str:
    return " × ".join(f"{size:,}" for size in sizes)
