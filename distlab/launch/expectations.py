"""Check that a node has what a launch needs: a program to run, GPUs and tools.

We check this before we start the ranks, so that you see one error instead of one from
each rank.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from distlab.launch.config import LaunchConfig, LaunchError
from distlab.launch.ranks import bound_to_cpus, own_gpu
from distlab.transports import find_transport, transport_names


def expect_program(script: str, run_as: str) -> None:
    """Check that there is something to run; we leave the check of modules to Python.

    Raises:
        LaunchError: the file doesn't exist, can't be read, or isn't a command.
    """
    if run_as == "module":
        return
    if run_as == "command":
        if shutil.which(script) is None:
            raise LaunchError(
                f"{script} is not a command: --no-python runs it directly, so it must "
                "be executable, and either in PATH or given with its folder"
            )
        return
    path = Path(script)
    try:
        is_there, is_file = path.exists(), path.is_file()
        is_program = is_file or (path / "__main__.py").is_file()  # Python's own rule
    except OSError as error:
        raise LaunchError(f"the script {path}: {error.strerror}") from error
    if not is_program:
        what = "is not a file" if is_there else "does not exist"
        raise LaunchError(f"the script {path} {what}")
    if is_file and not os.access(path, os.R_OK):
        raise LaunchError(f"the script {path} can't be read: permission denied")


def expect_resources(config: LaunchConfig) -> None:
    """Check that this node has the GPUs and CPUs that the options ask for.

    Raises:
        LaunchError: this node has fewer GPUs than ranks, or torch can't bind to CPUs.
    """
    if config.virtual_local_rank:
        own_gpu(config.nproc_per_node - 1, os.environ)
    if config.numa_binding is not None:
        if shutil.which("numactl") is None:
            raise LaunchError(
                "--numa-binding needs the program numactl, which is not in PATH: "
                "install it or drop the option"
            )
        for local_rank in range(config.nproc_per_node):
            bound_to_cpus([], local_rank, config.numa_binding)
    if not find_transport(config.backend).needs_gpu:
        return
    import torch

    num_gpus = torch.cuda.device_count()
    if num_gpus < config.nproc_per_node:
        others = " or ".join(transport_names(lambda one: not one.needs_gpu))
        raise LaunchError(
            f"backend {config.backend} needs a GPU for each of {config.nproc_per_node} "
            f"ranks, but torch finds {num_gpus}: choose {others}"
        )
