"""Networks as plain data, for a run in another process."""

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
    """The network as numbers, strings and lists.

    Raises:
        ValueError: it is of a kind that another process would not know.
    """
    name = type(net).__name__
    if type(net) is not _KINDS.get(name):
        raise _unknown(name)
    return {"kind": name, **asdict(net)}


def from_data(data: dict[str, Any]) -> Network:
    """The network that `as_data` was given.

    Raises:
        ValueError: it is of no known kind, or its figures cannot be.
    """
    facts = dict(data)
    name = facts.pop("kind", None)
    if name not in _KINDS:
        raise _unknown(name)
    return _KINDS[name](**facts)


def _unknown(name: object) -> ValueError:
    return ValueError(f"{name} is no network: known are {', '.join(_KINDS)}")
