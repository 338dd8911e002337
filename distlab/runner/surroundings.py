"""The environment variables with which processes that play ranks start."""

from __future__ import annotations

import os
from collections.abc import Mapping

from distlab.runner.gpus import without_gpus

# At each connection of a TCPStore torch looks for the name of the other end, for its
# log. It asks for 127.0.0.1 as an IPv6 address, which glibc does not find in
# /etc/hosts: the name server is asked, even where all ranks are on this machine. One
# that does not answer is waited for twice, 5 s each, unless somebody says otherwise.
# Source: github.com/pytorch/pytorch/issues/159007; resolv.conf(5).
_NAME_SERVER = {"RES_OPTIONS": "timeout:1 attempts:2"}


def of_zygote(environment: Mapping[str, str]) -> dict[str, str]:
    """Importing numpy and torch starts no thread, and finds no file of the learner."""
    one = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
    )
    path = {"PYTHONPATH": _elsewhere(environment)}
    return without_gpus({**_NAME_SERVER, **environment, **one, **path})


def _elsewhere(environment: Mapping[str, str]) -> str:
    """PYTHONPATH without the working folder: Python starts with imports of its own."""
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    here = os.path.realpath(os.curdir)
    return os.pathsep.join(p for p in paths if p and os.path.realpath(p) != here)
