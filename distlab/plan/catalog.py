"""Models and clusters by name, or from a TOML file with the same fields.

A file has one table per model or cluster, or the fields of a single one at the top.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from distlab.given.planning import Cluster, Link, Model
from distlab.sim.net.quantities import nearest

T = TypeVar("T")
Table = dict[str, Any]
_OURS = Path(__file__).parent
_BESIDE = ("aliases", "source", "sources", "sequence")  # no field of the dataclasses
_LINKS = ("intra_node", "inter_node")
_LINK = ("alpha_s", "bytes_per_s")
_MAY_BE_0 = ("alpha_s", "price_per_gpu_hour")


@dataclass(frozen=True, kw_only=True)
class Entry(Generic[T]):
    """A model or a cluster, and the sources of its numbers."""

    name: str
    value: T
    sources: dict[str, str]  # by field; "" stands for all fields
    sequence: int = 0  # of a model: the length it was trained with; 0 if unknown


def find_model(name: str) -> Entry[Model]:
    """Return the model of this name, or the one in this TOML file.

    Raises:
        ValueError: there is none, or its description is incomplete or wrong.
    """
    return _find(name, "model", _model)


def find_cluster(name: str) -> Entry[Cluster]:
    """Return the cluster of this name, or the one in this TOML file.

    Raises:
        ValueError: there is none, or its description is incomplete or wrong.
    """
    return _find(name, "cluster", _cluster)


def _find(name: str, kind: str, read: Callable[[Table], T]) -> Entry[T]:
    ours = tables(kind)
    aliases = {
        alias: key for key, table in ours.items() for alias in table.get("aliases", ())
    }
    key = aliases.get(name.lower(), name.lower())
    if key in ours:
        table = ours[key]
    elif name.endswith(".toml") or Path(name).is_file():
        key, table = _of_file(Path(name), kind)
    else:
        near = nearest(name, [*ours, *aliases])
        raise ValueError(
            f"there is no {kind} {name!r}{near}; known are {', '.join(ours)}, or pass "
            "a TOML file"
        )
    try:
        value = read({k: v for k, v in table.items() if k not in _BESIDE})
        sequence = 0
        if "sequence" in table:
            sequence = int(_number(table["sequence"], "sequence", whole=True))
    except ValueError as error:
        raise ValueError(f"{kind} {name}: {error}") from None
    sources = dict(table.get("sources", {}))
    if "source" in table:
        sources[""] = table["source"]
    return Entry(name=key, value=value, sources=sources, sequence=sequence)


@functools.cache
def tables(kind: str) -> dict[str, Table]:
    """Return the tables that come with distlab, in models.toml or clusters.toml."""
    path = _OURS / f"{kind}s.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _of_file(path: Path, kind: str) -> tuple[str, Table]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} isn't TOML: {error}") from None
    inner = {
        name: table
        for name, table in found.items()
        if isinstance(table, dict) and name not in ("sources", *_LINKS)
    }
    if len(found) == len(inner) == 1:
        return next(iter(inner.items()))
    if inner:
        raise ValueError(f"{path} must describe one {kind}, but has {len(inner)}")
    return path.stem, found


def _model(table: Table) -> Model:
    given = {"gated": False, **table}
    given.setdefault("kv_heads", given.get("heads", 1))  # without heads, we refuse
    model = Model(**_checked(given, Model))
    for name, parts, whole in (
        ("heads", model.heads, model.hidden),
        ("kv_heads", model.kv_heads, model.heads),
    ):
        if whole % parts:
            raise ValueError(f"{name} = {parts} doesn't divide {whole}")
    return model


def _cluster(table: Table) -> Cluster:
    given = dict(table)
    for name in _LINKS:
        link = given.get(name)
        if link is None:
            continue
        if not isinstance(link, dict) or set(link) != set(_LINK):
            raise ValueError(
                f"{name} must look like {{ alpha_s = 5e-6, bytes_per_s = 50e9 }}"
            )
        given[name] = Link(**{key: _number(link[key], key) for key in _LINK})
    cluster = Cluster(**_checked(given, Cluster))
    if not 0 < cluster.matmul_efficiency <= 1:
        raise ValueError(
            f"matmul_efficiency is {cluster.matmul_efficiency}, but it must be above 0 "
            "and at most 1"
        )
    return cluster


def _checked(given: Table, kind: type) -> Table:
    """Return the fields after checking them against those of the dataclass `kind`."""
    known = {field.name: field for field in fields(kind)}
    for name in given:
        if name not in known:
            raise ValueError(f"there is no field {name!r}{nearest(name, known)}")
    missing = [
        name
        for name, field in known.items()
        if field.default is MISSING and name not in given
    ]
    if missing:
        raise ValueError(f"these fields are missing: {', '.join(missing)}")
    return {
        name: value if isinstance(value, Link) else _scalar(value, known[name])
        for name, value in given.items()
    }


def _scalar(value: Any, field: Field[Any]) -> float | bool:
    if field.type != "bool":
        return _number(value, field.name, whole=field.type == "int")
    if not isinstance(value, bool):
        raise ValueError(f"{field.name} is {value!r}, but it must be true or false")
    return value


def _number(value: Any, name: str, *, whole: bool = False) -> float:
    is_right = isinstance(value, int) or (isinstance(value, float) and not whole)
    is_right = is_right and not isinstance(value, bool) and math.isfinite(value)
    if not is_right or value < 0 or (value == 0 and name not in _MAY_BE_0):
        kind = "a number above 0"
        if whole:
            kind = "a whole number, 1 or more"
        elif name in _MAY_BE_0:
            kind = "a number, 0 or more"
        raise ValueError(f"{name} is {value!r}, but it must be {kind}")
    return value if whole else float(value)
