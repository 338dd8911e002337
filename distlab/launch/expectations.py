"""What a launch needs of its node: a program that can be run, GPUs, tools.

Refused here, in one sentence, rather than by each rank.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from distlab.launch.config import LaunchConfig, LaunchError
from distlab.launch.ranks import bound_to_cpus, own_gpu


def expect_program(script: str, run_as: str) -> None:
    """See that there is something to run; what a module is, only Python knows.

    Raises:
        LaunchError: there is no such file, it can't be read, or it is no command.
    """
    if run_as == "module":
        return
    if run_as == "command":
        if shutil.which(script) is None:
            raise LaunchError(
                f"{script} is no command: with --no-python it is run as it is, so it "
                "must be executable, and in PATH or named with its folder"
            )
        return
    path = Path(script)
    try:
        is_there, is_file = path.exists(), path.is_file()
        is_program = is_file or (path / "__main__.py").is_file()  # as Python has it
    except OSError as error:
        raise LaunchError(f"the script {path}: {error.strerror}") from error
    if not is_program:
        what = "is no file" if is_there else "is not there"
        raise LaunchError(f"the script {path} {what}")
    if is_file and not os.access(path, os.R_OK):
        raise LaunchError(f"the script {path} can't be read: permission denied")


def expect_resources(config: LaunchConfig) -> None:
    """See that there are the GPUs and the CPUs that the options ask for.

    Raises:
        LaunchError: this node has fewer GPUs than ranks, or torch can't bind to CPUs.
    """
    if config.virtual_local_rank:
        own_gpu(config.nproc_per_node - 1, os.environ)
    if config.numa_binding is not None:
        if shutil.which("numactl") is None:
            raise LaunchError(
                "--numa-binding needs the program numactl, which is not in PATH: "
                "install it, or leave the option out"
            )
        for local_rank in range(config.nproc_per_node):
            bound_to_cpus([], local_rank, config.numa_binding)
    if config.backend != "nccl":
        return
    import torch

    num_gpus = torch.cuda.device_count()
    if num_gpus < config.nproc_per_node:
        raise LaunchError(
            f"backend nccl needs a GPU for each of {config.nproc_per_node} ranks, and "
            f"torch finds {num_gpus}: choose gloo or tcp"
        )
