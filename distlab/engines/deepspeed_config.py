"""Read our own fields out of a complete DeepSpeed configuration.

    deepspeed_config (a dictionary or a JSON file) ─▶ fields of DistributedConfig
                                                   ─▶ optimizer and scheduler
                                                   ─▶ the rest, which DeepSpeed gets

If you also pass a field to the trainer, both must agree. The value "auto", which
other trainers fill in, means that the configuration doesn't set the field.

Source: DeepSpeed's documentation, "Configuration JSON".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distlab.engines.expect import EngineError

FIELDS = {
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
}
"""DeepSpeed's names for our fields."""
OF_RANKS = (*FIELDS, "train_batch_size", "optimizer", "scheduler", "fp16", "bf16")
"""Settings we don't leave to DeepSpeed, because the trainer does it on every engine."""
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.AdamW,  # DeepSpeed's Adam decays as AdamW by default
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
}
DEEPSPEEDS_OWN = ("torch_adam", "adam_w_mode", "fused", "bias_correction")


def read(given: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Read `deepspeed_config` as a dictionary, without the fields that are "auto".

    Raises:
        EngineError: the file doesn't exist, or doesn't contain a JSON object.
    """
    if isinstance(given, Mapping):
        return _without_auto(given)
    try:
        found = json.loads(Path(given).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError) as error:
        raise EngineError(
            f"deepspeed_config {given} cannot be read: {error}"
        ) from error
    if not isinstance(found, dict):
        raise EngineError(f"deepspeed_config {given} holds no JSON object")
    return _without_auto(found)


def fields_in(more: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """Return the fields of DistributedConfig that a configuration sets.

    Raises:
        EngineError: DeepSpeed has no such setting, or two settings contradict each
            other.
    """
    found = {ours: more[name] for name, ours in FIELDS.items() if name in more}
    if found.get("gradient_clipping") == 0:
        del found["gradient_clipping"]  # DeepSpeed's way to say none
    stage = _part(more, "zero_optimization").get("stage")
    if stage is not None:
        found["zero_stage"] = stage
    for name in ("bf16", "fp16"):
        if _part(more, name).get("enabled"):
            found["mixed_precision"] = name
    micro = _micro_batch(more, world_size)
    return found if micro is None else {**found, "batch_size": micro}


def _micro_batch(more: Mapping[str, Any], world_size: int) -> int | None:
    """Return one rank's samples in a microbatch, computed from all ranks' total."""
    total, micro = more.get("train_batch_size"), more.get(next(iter(FIELDS)))
    if total is None:
        return micro
    others = world_size * more.get("gradient_accumulation_steps", 1)
    if micro is None and total % others == 0:
        return int(total // others)
    if micro is None or micro * others != total:
        each = "" if micro is None else f" × {micro} samples"
        raise EngineError(
            f"deepspeed_config has train_batch_size {total}, which isn't {world_size} "
            f"ranks × {others // world_size} microbatches{each}: leave it out"
        )
    return int(micro)


def optimizer_in(more: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return a function that creates the configured optimizer, or None without one.

    Raises:
        EngineError: torch has no such optimizer.
    """
    if "optimizer" not in more:
        return None
    named = _part(more, "optimizer")
    kind = str(named.get("type"))
    if kind.lower() not in OPTIMIZERS:
        known = "Adam, AdamW, SGD, Adagrad"
        raise EngineError(
            f"deepspeed_config has the optimizer {kind}; there are {known}: give the "
            "trainer another as optimizer"
        )
    given = _without_auto(named.get("params", {}))
    decays = given.get("adam_w_mode", True) or kind.lower() != "adam"
    made = OPTIMIZERS[kind.lower()] if decays else torch.optim.Adam
    own = {name: v for name, v in given.items() if name not in DEEPSPEEDS_OWN}
    return partial(made, **own)


def scheduler_in(more: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return a function that creates the configured scheduler, or None without one."""
    if "scheduler" not in more:
        return None
    named = _part(more, "scheduler")
    given = _without_auto(named.get("params", {}))
    return partial(_deepspeeds, kind=str(named.get("type")), given=given)


def rest_of(more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that we pass on to DeepSpeed."""
    return {name: value for name, value in more.items() if name not in OF_RANKS}


def _deepspeeds(optimizer: Any, *, kind: str, given: dict[str, Any]) -> Any:
    from distlab.engines.outside import engine

    module = engine("deepspeed.runtime.lr_schedules", "deepspeed")
    made = getattr(module, kind, None)
    if made is None or kind not in module.VALID_LR_SCHEDULES:
        known = ", ".join(module.VALID_LR_SCHEDULES)
        raise ValueError(f"deepspeed_config has {kind}; DeepSpeed has {known}")
    return made(optimizer, **given)


def _part(more: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = more.get(name, {})
    if not isinstance(found, Mapping):
        raise EngineError(
            f"deepspeed_config has {name} {found!r}, must be a dictionary"
        )
    return found


def _without_auto(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_auto(value) if isinstance(value, Mapping) else value
        for name, value in given.items()
        if value != "auto"
    }
