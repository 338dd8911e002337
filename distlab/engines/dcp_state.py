"""An engine's checkpoint as a DCP folder, which a script of FSDP2 can load, and back.

    <folder>/epoch_0003        a folder instead of epoch_0003.pt

A folder that such a script has saved says at most how many epochs and steps it took, so
the rows of its epochs have losses of nan.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distlab.dcp import DcpError, TrainingState, load_more, load_state, save_state
from distlab.engines.expect import EngineError
from distlab.engines.history import EpochRow

BY = "engines"


def save(folder: Path, epoch: int, state: dict[str, Any]) -> None:
    """Write the checkpoint of `epoch` finished epochs, replacing an earlier one.

    Raises:
        EngineError: the folder can't be written or read back.
    """
    try:
        save_state(folder, to_state({**state, "epoch": epoch}), replaces=True)
    except DcpError as error:
        raise EngineError(f"the checkpoint {error}") from error


def load(folder: Path) -> dict[str, Any]:
    """Read a DCP folder as a checkpoint of the engines.

    Raises:
        EngineError: it isn't one, or is damaged.
    """
    try:
        return from_state(load_state(folder))
    except DcpError as error:
        raise EngineError(str(error)) from error


def began(folder: Path) -> float:
    """Return when the training began that saved a folder, 0 if nobody knows.

    Raises:
        DcpError: the folder can't be read.
    """
    return float(load_more(folder).get("state", {}).get("began", 0.0))


def to_state(state: dict[str, Any]) -> TrainingState:
    """Name everything in a checkpoint of the engines as torch's get_state_dict does."""
    optimizer = state["optimizer"]
    parts = ("weights", "optimizer", "num_steps", "epoch", "format", "passed_over")
    more = {name: value for name, value in state.items() if name not in parts}
    kind = {"kind": optimizer["kind"]} if "kind" in optimizer else {}
    return TrainingState(
        model=state["weights"],
        optim={"state": optimizer["state"], "param_groups": optimizer["param_groups"]},
        step=state["num_steps"],
        epoch=state["epoch"],
        more={"by": BY, **kind, "state": more},
    )


def from_state(found: TrainingState) -> dict[str, Any]:
    """Undo `to_state`, or make the best of what another program has saved."""
    optimizer = dict(found.optim)
    if found.more.get("by") == BY:
        if "kind" in found.more:
            optimizer["kind"] = found.more["kind"]
        state = dict(found.more["state"])
    else:
        state = _unknown(found.epoch or 0, found.step or 0)
        groups = optimizer["param_groups"]
        optimizer["param_groups"] = [_without_schedule(group) for group in groups]
    state |= {"weights": found.model, "optimizer": optimizer}
    return state | {"num_steps": found.step or 0, "epoch": found.epoch or 0}


def _without_schedule(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "initial_lr"}


def _unknown(num_epochs: int, num_steps: int) -> dict[str, Any]:
    """Return everything that only distlab's engines save, as far as nobody knows it."""
    row = EpochRow(
        epoch=0,
        loss=math.nan,
        learning_rate=math.nan,
        grad_norm=math.nan,
        seconds=0.0,
        throughput=0.0,
    )
    return {
        "scaler": {},
        "rows": [{**asdict(row), "epoch": n + 1} for n in range(num_epochs)],
        "losses": [math.nan] * num_steps,
        "spent_s": 0.0,
    }
