"""GPUs: hidden from the process that forks the ranks, shown to the ranks over NCCL.

Once a process has asked CUDA anything, even how many GPUs there are, it has one more
thread, and what is forked from it cannot use CUDA. torch's import path asks here and
there. So the zygote sees none; a rank over NCCL sees what the user's shell does.

Source: "CUDA in multiprocessing" in torch's notes; `torch.cuda.is_available`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_KEPT = "DISTLAB_VISIBLE_DEVICES"  # what the user had set, if anything


def without_gpus(environment: Mapping[str, str]) -> dict[str, str]:
    """A copy of `environment` for a process that must not wake CUDA."""
    kept = {_KEPT: environment[_VISIBLE]} if _VISIBLE in environment else {}
    # The second lets torch believe the first without asking CUDA.
    hidden = {_VISIBLE: "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    return {**environment, **kept, **hidden}


def show_gpus(environment: MutableMapping[str, str] = os.environ) -> None:
    """Undo `without_gpus` in this process, before it asks for a GPU."""
    environment.pop(_VISIBLE, None)
    if _KEPT in environment:
        environment[_VISIBLE] = environment.pop(_KEPT)


def are_hidden(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process was told that there are none."""
    return environment.get(_VISIBLE) == ""
