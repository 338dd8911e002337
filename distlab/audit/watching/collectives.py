"""Calls of torch.distributed: who called what, on which line, with which numbers.

The simulator and gloo know more calls than these: those that DDP makes in C++. They
need no line of their own, because forward() and backward() have one.
"""

from __future__ import annotations

import functools
import sys
from functools import partial
from traceback import walk_stack
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from distlab.audit.fingerprints import local
from distlab.audit.log import Memory, current
from distlab.audit.watching.models import is_parameter
from distlab.audit.watching.patches import Patches

FEW = 16  # elements of which the values are kept
CALLS = (
    *("all_reduce", "reduce", "broadcast", "barrier", "monitored_barrier"),
    *("all_gather", "all_gather_into_tensor", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    *("all_gather_object", "gather_object", "broadcast_object_list"),
    *("scatter_object_list", "all_gather_coalesced", "all_reduce_coalesced"),
    *("new_group", "send", "recv", "isend", "irecv", "batch_isend_irecv"),
)
NOT_COLLECTIVE = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv"})
SAVING = frozenset(
    (
        *("state_dict", "full_tensor", "save", "async_save", "summon_full_params"),
        *("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict"),
        *("optim_state_dict", "full_optim_state_dict", "consolidate_state_dict"),
    )
)


def watch(patches: Patches) -> None:
    """Install the hooks, under both names of each call."""
    for name in CALLS:
        original = getattr(c10d, name, None)
        if original is None:
            continue
        observed = _observed(name, original)
        for owner in (c10d, dist):
            if getattr(owner, name, None) is original:
                patches.replace(owner, name, partial(_instead, observed))


def _instead(observed: Any, original: Any) -> Any:
    return observed


def _observed(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        memory = current()
        if memory is None or memory.in_call:
            return original(*args, **kwargs)
        memory.log.add(
            "collective",
            op=name,
            collective=name not in NOT_COLLECTIVE,
            saving=is_saving(),
            **_facts(memory, name, args, kwargs),
        )
        memory.in_call += 1
        try:
            return original(*args, **kwargs)
        finally:
            memory.in_call -= 1

    return call


def is_saving() -> str:
    """Return the function of torch that is collecting a state, or ""."""
    for frame, _ in walk_stack(sys._getframe()):
        if frame.f_code.co_name in SAVING and "torch" in frame.f_code.co_filename:
            return frame.f_code.co_name
    return ""


def _facts(memory: Memory, name: str, args: Any, kwargs: Any) -> dict[str, Any]:
    tensor = next((a for a in [*args, *kwargs.values()] if isinstance(a, Tensor)), None)
    operation = kwargs.get("op", args[1] if name == "all_reduce" and args[1:] else None)
    facts: dict[str, Any] = {
        "reduce": str(operation).rpartition(".")[2] if operation is not None else "SUM",
        "values": None,
        "gradient": "",
        "is_weight": False,
    }
    if name == "new_group":
        members = kwargs.get("ranks", args[0] if args else None)
        facts["members"] = sorted(members) if members is not None else []
        facts["local"] = bool(kwargs.get("use_local_synchronization"))
    if tensor is not None:
        if tensor.numel() <= FEW and not tensor.is_complex():
            facts["values"] = [float(v) for v in local(tensor).reshape(-1).cpu()]
        facts["gradient"] = _gradient_name(memory, tensor)
        facts["is_weight"] = is_parameter(memory, tensor)
    return facts


def _gradient_name(memory: Memory, tensor: Tensor) -> str:
    """Return whose gradient a tensor is, "" if it is none that we know."""
    if not tensor.numel():
        return ""
    where = tensor.data_ptr()
    for key, name in memory.names.items():
        grad = getattr(memory.kept.get(key), "grad", None)
        if grad is not None and (
            grad is tensor
            or (not hasattr(grad, "to_local") and grad.data_ptr() == where)
        ):
            return name
    return ""
