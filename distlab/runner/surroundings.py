"""The environment variables with which processes that play ranks start."""

from __future__ import annotations

import os
from collections.abc import Mapping

from distlab.runner.gpus import without_gpus


def of_zygote(environment: Mapping[str, str]) -> dict[str, str]:
    """Importing numpy and torch starts no thread, and finds no file of the learner."""
    one = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
    )
    path = {"PYTHONPATH": _elsewhere(environment)}
    return without_gpus({**soon_without_names(environment), **one, **path})


def soon_without_names(environment: Mapping[str, str]) -> dict[str, str]:
    """A name server that does not answer is asked for 1 s at a time, not for 5 s.

    At each connection of a TCPStore torch looks for the name of the other end, for its
    log. It asks for 127.0.0.1 as an IPv6 address, which /etc/hosts does not have, so
    that the name server is asked, even where all ranks are on this machine.

    Source: github.com/pytorch/pytorch/issues/159007; resolv.conf(5).
    """
    return {"RES_OPTIONS": "timeout:1 attempts:2", **environment}


def _elsewhere(environment: Mapping[str, str]) -> str:
    """PYTHONPATH without the working folder: Python starts with imports of its own."""
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    here = os.path.realpath(os.curdir)
    return os.pathsep.join(p for p in paths if p and os.path.realpath(p) != here)
