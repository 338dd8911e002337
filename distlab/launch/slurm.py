"""Translate srun's variables into those of torch.distributed.

    rank_environment   a script that srun started once for each rank
    agent_settings     our agent, which srun started once for each node

Source: the manual page of srun, "OUTPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from distlab.launch.config import DEFAULT_PORT, LaunchError

_RANK = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_NTASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
}


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from srun's.

    We add only those that `environment` lacks, and none if RANK is set or srun didn't
    start this process.
    Example: SLURM_PROCID=3, SLURM_NTASKS=4 → RANK=3, WORLD_SIZE=4
    """
    if "RANK" in environment or not {"SLURM_PROCID", "SLURM_NTASKS"} <= {*environment}:
        return {}
    found = {
        ours: environment[its] for ours, its in _RANK.items() if its in environment
    }
    nodes = _node_list(environment)
    if nodes:
        found["MASTER_ADDR"] = first_host(nodes)
    elif environment["SLURM_NTASKS"] == "1":
        found["MASTER_ADDR"] = "127.0.0.1"
    found["MASTER_PORT"] = str(job_port(environment))
    return {name: text for name, text in found.items() if name not in environment}


def agent_settings(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return LaunchConfig settings for an agent that srun started; {} without srun.

    Raises:
        LaunchError: srun started more than one agent on a node.
    """
    if "SLURM_STEP_ID" not in environment or "SLURM_NODEID" not in environment:
        return {}  # a batch script starts its programs on its first node only
    num_nodes = _number(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    num_tasks = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if num_tasks > num_nodes:
        raise LaunchError(
            f"srun started {num_tasks} agents on {num_nodes} "
            f"node{'s' * (num_nodes > 1)}: start one on each, with srun "
            "--ntasks-per-node=1, and say --nproc-per-node"
        )
    if num_nodes == 1:
        return {}
    return {
        "nnodes": num_nodes,
        "node_rank": _number(environment, "SLURM_NODEID"),
        "master_addr": first_host(_node_list(environment)),
        "master_port": job_port(environment),
    }


def first_host(nodes: str) -> str:
    """Return the first name in SLURM's short form of a list.

    Example: gpu[007-012,20],login → gpu007
    """
    match = re.match(r"([^\[,]*)(?:\[([^\]]*)\])?([^,]*)", nodes)
    assert match
    head, numbers, tail = match.groups()
    first = re.split(r"[-,]", numbers)[0] if numbers else ""
    return f"{head}{first}{tail}"


def job_port(environment: Mapping[str, str]) -> int:
    """Choose a port that two jobs on one node rarely share."""
    job = environment.get("SLURM_JOB_ID", "")
    return 20000 + int(job) % 10000 if job.isdigit() else DEFAULT_PORT


def _node_list(environment: Mapping[str, str]) -> str:
    step = environment.get("SLURM_STEP_NODELIST", "")
    return step or environment.get("SLURM_JOB_NODELIST", "")


def _number(environment: Mapping[str, str], *names: str) -> int:
    for name in names:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return 1
