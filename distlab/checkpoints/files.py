"""The parts of a checkpoint: file names, their bytes, and how the ranks exchange news.

    step-30.rank-0.1f0c9a2b.safetensors     a shard: the tensors of one rank
    step-30.rank-1.77d01e5a.safetensors
    step-30.json                            the manifest, which names the shards

A shard has the safetensors layout: the length of a header, the header in JSON (names,
dtypes, shapes, offsets), then the bytes of the tensors. Because it contains nothing
that can be executed, you can load a file that you don't trust.

Source: huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from distlab.comm import Comm

JSON = Any
"""None, a bool, a number, a str, or a list or a dict (keys: str) of these."""


class CheckpointError(RuntimeError):
    """Raised if a checkpoint wasn't saved or can't be loaded; one line says why."""


# ── names ───────────────────────────────────────────────────────────────────────────

TEMPORARY = ".tmp"
_NAME = re.compile(
    r"step-(\d+)(\.json|\.rank-\d+\.[0-9a-f]{8}\.safetensors)(\.tmp)?", re.ASCII
)


def manifest_name(step: int) -> str:
    """Return the name of a step's manifest, which is one file for all ranks."""
    return f"step-{step}.json"


def shard_name(step: int, rank: int, sha256: str) -> str:
    """Return the name of a rank's shard, which contains part of its hash.

    A shard with different bytes therefore gets a different name, so saving never
    overwrites a shard that exists.
    """
    return f"step-{step}.rank-{rank}.{sha256[:8]}.safetensors"


def step_of(name: str) -> int | None:
    """Return the step of a shard, manifest or temporary file; None for other files."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def manifest_steps(names: Sequence[str]) -> list[int]:
    """Return the steps that have a manifest, valid or not, in ascending order."""
    steps = (step_of(name) for name in names)
    return sorted({s for s in steps if s is not None and manifest_name(s) in names})


# ── the manifest ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A shard as the manifest lists it; `sha256` is the hash of its bytes, in hex."""

    name: str
    num_bytes: int
    sha256: str

    @property
    def content(self) -> tuple[int, str]:
        """The size and the SHA-256, as a pair that you can compare."""
        return self.num_bytes, self.sha256


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The list of a checkpoint's shards; a checkpoint exists if its manifest does.

    `files` has one record per rank, in rank order.
    """

    step: int
    files: tuple[FileRecord, ...]

    @property
    def world_size(self) -> int:
        """The number of ranks that saved the checkpoint."""
        return len(self.files)


def sha256_of(data: bytes) -> str:
    """Return the SHA-256 of `data` as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def record_of(data: bytes, step: int, rank: int) -> FileRecord:
    """Return the record of a shard, with its name; `vars(record)` fits into JSON."""
    sha256 = sha256_of(data)
    name = shard_name(step, rank, sha256)
    return FileRecord(name=name, num_bytes=len(data), sha256=sha256)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return two lines: the manifest in JSON, and the SHA-256 of the first line."""
    content = {
        "step": manifest.step,
        "world_size": manifest.world_size,
        "files": [vars(file) for file in manifest.files],
    }
    line = json.dumps(content, separators=(",", ":"))
    return f"{line}\n{sha256_of(line.encode())}\n".encode()


def decode_manifest(data: bytes) -> Manifest:
    """Read the bytes that encode_manifest returned.

    Raises:
        ValueError: the data is torn, was changed or isn't a manifest; one line says
            which.
    """
    line, _, rest = data.partition(b"\n")
    if rest != f"{sha256_of(line)}\n".encode():
        raise ValueError(_foreign(data) or "the manifest is torn or changed")
    try:
        content = json.loads(line)
        files = tuple(FileRecord(**file) for file in content["files"])
        return Manifest(step=content["step"], files=files)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError("this is no manifest of a checkpoint") from error


# ── a shard ─────────────────────────────────────────────────────────────────────────

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16,
    "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_META = "__metadata__"
_UNFIT = "unfit"
_PIECE = 1 << 20


@dataclass(frozen=True)
class Shard:
    """The state that one rank saved."""

    tensors: dict[str, Tensor]
    meta: dict[str, JSON]


def encode_shard(tensors: Mapping[str, Tensor], meta: Mapping[str, JSON]) -> bytes:
    """Return the bytes of a shard; tensors that share memory are each written in full.

    Raises:
        TypeError: the layout doesn't support a dtype, `meta` isn't valid JSON, or it
            marks a state that can't be saved: see `unfit`.
    """
    require_fit(meta)
    header: dict[str, Any] = {_META: {"meta": json.dumps(meta)}}
    parts: list[bytes] = []
    end = 0
    # Large elements first: each tensor then begins at a multiple of its element size.
    for name in sorted(tensors, key=lambda n: (-tensors[n].element_size(), n)):
        tensor = tensors[name]
        if tensor.dtype not in _DTYPE_NAMES or name == _META:
            raise TypeError(f'a shard cannot hold "{name}", dtype {tensor.dtype}')
        parts += _bytes_of(tensor)
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def unfit(why: str) -> dict[str, JSON]:
    """Make the `meta` of a state that can't be saved, so encode_shard raises `why`.

    If a rank raised right away, the others would wait in `save` forever. `save` reports
    the error to all ranks instead.
    """
    return {_UNFIT: why}


def require_fit(meta: Mapping[str, JSON]) -> None:
    """Refuse the `meta` of a state that can't be saved.

    Raises:
        TypeError: `meta` marks such a state; the message names the value.
    """
    if _UNFIT in meta:
        raise TypeError(meta[_UNFIT])


def decode_shard(data: bytes) -> Shard:
    """Read the bytes of a shard, which the safetensors package may have written.

    Raises:
        ValueError: the data isn't a shard, or is torn; one line says which.
    """
    length = int.from_bytes(data[:8], "little")
    text, body = data[8 : 8 + length], memoryview(data)[8 + length :]
    try:
        header = json.loads(text)
        meta = json.loads(header.pop(_META, {}).get("meta", "{}"))
        tensors = {name: _tensor_of(body, **place) for name, place in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        why = _foreign(data) or "this is no safetensors file, or it is torn"
        raise ValueError(why) from error
    return Shard(tensors, meta)


class Copies:
    """Copies tensors to the CPU, into memory that it reuses for the next copies."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the tensors, which stay unchanged until the next call."""
        self._memory = {n: self._copy(n, tensor) for n, tensor in tensors.items()}
        return self._memory

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        copy = self._memory.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        source = tensor.detach()
        is_lazy = source.is_conj() or source.is_neg()
        if is_lazy or not source.is_contiguous() or source.device != copy.device:
            return copy.copy_(source)
        # NumPy moves bytes with memmove. That is 1.1 times as fast as copy_ for tensors
        # of 8 MB, and 1.8 times for 100 MB, where memmove writes past the caches.
        _as_bytes(copy)[:] = _as_bytes(source)
        return copy


def _bytes_of(tensor: Tensor) -> list[bytes]:
    """Return the tensor's bytes in pieces.

    If a thread copied many bytes at once, it would hold Python's lock and stop the
    training for that long. Small copies don't, and bytes.join releases the lock if all
    its parts are bytes.
    """
    array = bytes_of(tensor)
    return [array[i : i + _PIECE].tobytes() for i in range(0, len(array), _PIECE)]


def bytes_of(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """Return a dense tensor's bytes in row order, with conjugate views resolved."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    return _as_bytes(flat) if flat.numel() else np.empty(0, np.uint8)


def _as_bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """Return the memory of a contiguous CPU tensor as bytes."""
    return tensor.view(-1).view(torch.uint8).numpy()


def _tensor_of(
    body: memoryview, *, dtype: str, shape: list[int], data_offsets: list[int]
) -> Tensor:
    start, stop = data_offsets
    tensor = torch.empty(shape, dtype=_DTYPES[dtype])
    if not 0 <= start <= stop <= len(body) or stop - start != tensor.nbytes:
        raise ValueError("a tensor lies beyond the end of the file")
    if tensor.numel():
        # A copy in memory of its own: it can be written to, and the file can go.
        own = bytearray(body[start:stop])
        tensor = torch.frombuffer(own, dtype=_DTYPES[dtype]).view(shape)
    return tensor


def _foreign(data: bytes) -> str | None:
    """Return a message if torch.save or pickle wrote the file, and None otherwise."""
    if data[:4] == b"PK\x03\x04" or (data[:1] == b"\x80" and data[1:2] <= b"\x05"):
        return "this is a pickle, which could run any code: it is not opened"
    return None


# ── between the ranks ───────────────────────────────────────────────────────────────


def exchange(comm: Comm, value: JSON) -> list[JSON]:
    """Return the values of all ranks in rank order; collective.

    Cost: two all_gather calls, one of 8 bytes and one of the length of the longest
    value.
    """
    return [json.loads(one) for one in exchange_bytes(comm, json.dumps(value).encode())]


def exchange_bytes(comm: Comm, data: bytes) -> list[bytes]:
    """Return the bytes of all ranks in rank order, at least one each; collective.

    Cost: as `exchange`.
    """
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    length = torch.tensor([len(own)], device=comm.device)
    lengths = length.new_empty(comm.world_size)
    comm.all_gather(lengths, length)
    longest = int(lengths.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=comm.device)
    padded[: len(own)] = own.to(comm.device)
    gathered = padded.new_empty(comm.world_size * longest)
    comm.all_gather(gathered, padded)
    rows = gathered.view(comm.world_size, longest).cpu()
    return [
        row[:size].numpy().tobytes()
        for row, size in zip(rows, lengths.tolist(), strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The checkpoint that `load` found, with one shard for each rank that saved.

    `refused` has one line for each newer checkpoint that isn't complete.
    """

    step: int
    shards: tuple[Shard, ...]
    refused: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """The number of ranks that saved the checkpoint."""
        return len(self.shards)
