"""Read the dumps of torch's flight recorder: the last calls of each rank.

Torch writes one file per rank, a pickle or JSON, with the fields of FlightRecorder.hpp:
https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/FlightRecorder.hpp

How backends differ, as seen with torch 2.13:

- NCCL records the state of each call. With gloo the state remains "scheduled", and
  only `retired` says that a call has ended. NCCL also retires calls that timed out.
- NCCL lists the members of every group. Gloo doesn't, so we only know that a rank
  belongs to a group if it has made a call there.
- Gloo records neither send nor recv nor monitored_barrier.
- No backend records the root of a broadcast or a reduce.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distlab.runner.autopsy import own_frame
from distlab.terminal import ranks_in_words

_VERSION = 2  # torch raises it when fields change their meaning
# torch appends the rank to a prefix, and may append a time to that.
_RANK = re.compile(r"rank_?(\d{1,6})(?!\d)|(?<!\d)(\d{1,6})\D*$")
_PEERS = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
_ENDINGS = (".json", ".pkl", ".pickle", ".pt", ".bin")
_DEFAULT = "default_pg"
_BROKEN = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)
_FUNCTIONS = {
    "_all_gather_base": "all_gather_into_tensor",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
}
_DTYPES = {
    "Bool": "bool",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Float": "float32",
    "Double": "float64",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}

Sizes = tuple[tuple[int, ...], ...]
Group = tuple[str, tuple[int, ...]]
"""A group's name in torch, and its members if the dump lists them."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One entry of a dump; `src` and `dst` are ranks of the whole job."""

    rank: int
    group: Group
    number: int
    op: str
    src: int | None
    dst: int | None
    inputs: Sizes
    outputs: Sizes
    dtype: str
    done: bool
    created_ns: int
    place: tuple[str, int] | None
    tag: int = 0
    root: int | None = None
    reduce_op: str | None = None
    takes: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()
    """Of an all-to-all: elements from and for each member, where that is known."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the rank's own tensor; None if the call has none."""
        if self.op == "barrier":  # NCCL reduces a tensor of its own
            return None
        sizes = self.outputs if self.op in ("recv", "scatter") else self.inputs
        sizes = sizes or self.outputs
        return sizes[0] if sizes else None


@dataclass(frozen=True, kw_only=True)
class Dump:
    """One rank's file. `whole` is false if the ring buffer lost the first calls."""

    rank: int
    path: Path
    backend: str
    calls: tuple[Call, ...]
    names: dict[str, str]
    listed: int
    whole: bool


@dataclass(frozen=True)
class Records:
    """The dumps of a job by rank, and the number of its ranks as far as it is known."""

    dumps: dict[int, Dump]
    world_size: int
    names: dict[str, str] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)
    """Of groups that are none of torch's: what a sentence calls them."""
    ended: frozenset[int] = frozenset()
    """The ranks whose processes are known to have ended."""
    waits: Mapping[int, Call] = field(default_factory=dict)
    """The call in which a rank's main thread waits, where that is known."""
    is_live: bool = False
    """Messages are on record too, because we recorded them ourselves."""

    @property
    def missing(self) -> list[int]:
        """The ranks without a dump."""
        return [rank for rank in range(self.world_size) if rank not in self.dumps]

    def members(self, group: Group) -> list[int]:
        """The ranks of a group: those listed, or those that made a call there."""
        name, ranks = group
        if ranks:
            return list(ranks)
        if self.names.get(name) == _DEFAULT:
            return list(range(self.world_size))
        return [
            r for r, d in self.dumps.items() if any(c.group == group for c in d.calls)
        ]

    def name(self, group: Group) -> str:
        """How a sentence names the group."""
        name, ranks = group
        if name in self.titles:
            return self.titles[name]
        told = self.names.get(name, "")
        if told == _DEFAULT:
            return "the default group"
        title = told if told and told != "undefined" else name
        return f'group "{title}"' + (f" ({ranks_in_words(ranks)})" if ranks else "")


def read_dumps(paths: Iterable[Path], world_size: int = 0) -> Records:
    """Read one dump per rank from files, or from all files of a folder.

    `world_size` is for jobs whose last ranks left no dump; 0 takes it from the dumps.

    Raises:
        ValueError: a file is missing, damaged, of another kind, or a rank's second.
    """
    dumps: dict[int, Dump] = {}
    for path in _files(paths):
        dump = _read(path)
        if dump.rank in dumps:
            raise ValueError(
                f"{dumps[dump.rank].path} and {path} are both from rank {dump.rank}: "
                "pass one file per rank, all from the same job"
            )
        dumps[dump.rank] = dump
    if not dumps:
        raise ValueError("there is no dump here: pass the files or their folder")
    seen = max(max(dumps) + 1, *(dump.listed for dump in dumps.values()))
    if world_size and world_size < seen:
        raise ValueError(f"--ranks {world_size}: the dumps mention {seen} ranks")
    names = {key: name for dump in dumps.values() for key, name in dump.names.items()}
    return Records(dict(sorted(dumps.items())), world_size or seen, names)


def _files(paths: Iterable[Path]) -> Iterable[Path]:
    for path in paths:
        if path.is_dir():
            inside = (each for each in path.iterdir() if not each.name.startswith("."))
            yield from sorted(each for each in inside if each.is_file())
        elif path.is_file():
            yield path
        else:
            raise ValueError(f"{path}: there is no such file")


def _read(path: Path) -> Dump:
    stem = path.name
    for ending in _ENDINGS:
        stem = stem.removesuffix(ending)
    rank = _RANK.search(stem)
    if rank is None:
        raise ValueError(
            f"{path}: the name of a dump must end with its rank, as in "
            "nccl_trace_rank_3"
        )
    value = _load(path)
    if not isinstance(value, dict) or not {"entries", "version"} <= value.keys():
        raise ValueError(f"{path} is not a dump of torch's flight recorder")
    if str(value["version"]).partition(".")[0] != str(_VERSION):
        raise ValueError(
            f"{path} has version {value['version']} of the format, but distlab reads "
            f"version {_VERSION}: use the torch that wrote it to read it"
        )
    try:
        return dump_of(path, int(rank[1] or rank[2]), value)
    except _BROKEN as error:
        raise ValueError(
            f"{path} is damaged: {type(error).__name__}: {error}"
        ) from error


class _PlainData(pickle.Unpickler):
    """Loads numbers, texts, lists and dicts. Anything else would be code."""

    def find_class(self, module: str, name: str) -> Any:
        raise _CodeError(f"{module}.{name}")


class _CodeError(Exception):
    pass


def _load(path: Path) -> Any:
    data = path.read_bytes()
    try:
        if data[:1] == b"\x80":
            return _PlainData(io.BytesIO(data)).load()
        return json.loads(data)
    except _CodeError as error:
        raise ValueError(
            f"{path} is not a dump, because unpickling it would call {error}. We "
            "didn't run any of it"
        ) from None
    except _BROKEN:
        raise ValueError(
            f"{path} is damaged, or isn't a dump of torch's flight recorder"
        ) from None


def dump_of(path: Path, rank: int, value: dict[str, Any]) -> Dump:
    """Read the record of one rank, as torch's flight recorder gives it."""
    entries = value["entries"]
    members = {
        str(name): tuple(map(int, json.loads(str(config["ranks"]))))
        for name, config in (value.get("pg_config") or {}).items()
    }
    groups = [entry["process_group"] for entry in entries]
    calls = [_call(rank, entry, members) for entry in entries]
    backend = next((e["profiling_name"].split(":")[0] for e in entries), "")
    return Dump(
        rank=rank,
        path=path,
        backend=backend,
        calls=tuple(call for call in calls if call is not None),
        names={str(name): str(description) for name, description in groups},
        listed=max((max(ranks) + 1 for ranks in members.values() if ranks), default=0),
        whole=min((int(e["record_id"]) for e in entries), default=0) == 0,
    )


def _call(
    rank: int, entry: dict[str, Any], members: dict[str, tuple[int, ...]]
) -> Call | None:
    """One entry; None for the end of a coalesced call, whose parts come before it."""
    backend, _, told = str(entry["profiling_name"]).partition(":")
    if told == "coalesced":
        return None
    name = str(entry["process_group"][0])
    ranks = members.get(name, ())
    peers = _PEERS.fullmatch(told)
    src = dst = None
    if peers:
        ends = [int(peers[2]), int(peers[3])]
        src, dst = ends if peers[1] == "send" else ends[::-1]
        if ranks:  # torch counts within the group
            order = sorted(ranks)
            src, dst = order[src], order[dst]
    inputs, outputs = _sizes(entry["input_sizes"]), _sizes(entry["output_sizes"])
    dtypes = [*entry["input_dtypes"], *entry["output_dtypes"]]
    state = str(entry["state"])
    frames = tuple(
        (str(f["filename"]), int(f["line"])) for f in entry.get("frames", ())
    )
    return Call(
        rank=rank,
        group=(name, ranks),
        number=int(entry["p2p_seq_id" if peers else "collective_seq_id"]),
        op=peers[1] if peers else entry.get("op") or _FUNCTIONS.get(told, told),
        src=src,
        dst=dst,
        inputs=inputs,
        outputs=outputs,
        dtype=_DTYPES.get(dtypes[0], str(dtypes[0]).lower()) if dtypes else "",
        done=state == "completed" or (backend == "gloo" and bool(entry["retired"])),
        created_ns=int(entry["time_created_ns"]),
        place=own_frame(tuple(frames[::-1])),
        root=entry.get("root"),
        reduce_op=entry.get("reduce_op") or None,
    )


def _sizes(value: Any) -> Sizes:
    return tuple(tuple(map(int, size)) for size in value)


def elements(sizes: Sizes) -> int:
    """The number of elements of all tensors together."""
    return sum(map(math.prod, sizes))
