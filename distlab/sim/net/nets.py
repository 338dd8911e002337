"""Convert networks to plain data, for a run in another process."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from distlab.sim.net.fabric import Fabric
from distlab.sim.net.links import AlphaBeta, Network
from distlab.sim.net.loggp import LogGP
from distlab.sim.net.piecewise import Piecewise

_Known = AlphaBeta | Fabric | LogGP | Piecewise
_KINDS: dict[str, type[_Known]] = {
    kind.__name__: kind for kind in (AlphaBeta, Fabric, LogGP, Piecewise)
}


def as_data(net: Network) -> dict[str, Any]:
    """Return the network as numbers, strings and lists.

    Raises:
        ValueError: another process wouldn't know networks of this kind.
    """
    name = type(net).__name__
    if type(net) is not _KINDS.get(name):
        raise _unknown(name)
    return {"kind": name, **asdict(net)}


def from_data(data: dict[str, Any]) -> Network:
    """Return the network from the data of `as_data`.

    Raises:
        ValueError: the kind is unknown, or its numbers are impossible.
    """
    facts = dict(data)
    name = facts.pop("kind", None)
    if name not in _KINDS:
        raise _unknown(name)
    return _KINDS[name](**facts)


def _unknown(name: object) -> ValueError:
    return ValueError(f"{name} is no network: known are {', '.join(_KINDS)}")
