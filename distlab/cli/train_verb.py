"""Flags of `distlab train`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import distlab

DEFAULT = "pytorch-ddp"
BACKENDS = "one of the table in distlab.engines"  # the help says which

Script = Annotated[Path, typer.Option("--script", help="The training script to run.")]
Backend = Annotated[
    str,
    typer.Option(help=f"Engine to train with: {BACKENDS}."),
]
NumGpus = Annotated[int | None, typer.Option(help="Total number of ranks.")]
NumNodes = Annotated[
    int, typer.Option(help="Number of nodes. Run this command on each of them.")
]
GpusPerNode = Annotated[int | None, typer.Option(help="Number of ranks per node.")]
Address = Annotated[
    str | None, typer.Option(help="Address of a Ray cluster, such as ray://head:10001.")
]
NodeRank = Annotated[
    int | None, typer.Option(help="Number of this node, counting from 0.")
]
MasterAddr = Annotated[str, typer.Option(help="Address of node 0.")]
MasterPort = Annotated[int, typer.Option(help="Port on node 0 where the nodes meet.")]
Wire = Annotated[
    str | None,
    typer.Option(
        "--communication-backend",
        help="Backend for messages between ranks: nccl or gloo.",
    ),
]
LogDir = Annotated[
    Path | None,
    typer.Option(help="Write a log for each rank, rank_<r>.log, to this folder."),
]
Rate = Annotated[
    float,
    typer.Option("--cost-per-gpu-hour", help="What one rank costs per hour."),
]
MaxCost = Annotated[
    float | None,
    typer.Option(help="Stop all ranks once the run has cost this much."),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(help="Arguments for the script. Put them after --."),
]


class TrainCommand(TyperCommand):
    """Fills in the names of the engines, without importing torch."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help with the names that the table of strategies has."""
        from distlab.registry import written_names

        engines = Path(distlab.__file__).parent / "engines"
        names = written_names(engines, "strategy", "distlab.strategies")
        named = ", ".join(sorted(names, key=lambda name: name != DEFAULT))
        for option in self.params:
            said = getattr(option, "help", None) or ""
            if BACKENDS in said:
                vars(option)["help"] = said.replace(BACKENDS, named)
        super().format_help(ctx, formatter)


def train(
    script: Script,
    arguments: Arguments = None,
    backend: Backend = DEFAULT,
    num_gpus: NumGpus = None,
    num_nodes: NumNodes = 1,
    gpus_per_node: GpusPerNode = None,
    address: Address = None,
    node_rank: NodeRank = None,
    master_addr: MasterAddr = "127.0.0.1",
    master_port: MasterPort = 0,
    communication_backend: Wire = None,
    log_dir: LogDir = None,
    cost_per_gpu_hour: Rate = 0.0,
    max_cost: MaxCost = None,
) -> int:
    """Run your own script on several ranks, or join a torchrun or srun job."""
    from distlab.engines.config import DistributedConfig
    from distlab.engines.expect import EngineError
    from distlab.engines.script import NodeMeeting, run_script
    from distlab.launch.slurm import agent_settings

    config = DistributedConfig(
        backend=backend,
        num_gpus=num_gpus,
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        communication_backend=communication_backend,
        cost_per_gpu_hour=cost_per_gpu_hour,
        max_cost=max_cost,
    )
    if num_nodes == 1 and node_rank:
        raise EngineError(
            f"--node-rank is {node_rank}, but --num-nodes is 1: pass the "
            "number of nodes"
        )
    said = agent_settings(os.environ)
    meeting = NodeMeeting(
        node_rank=said.get("node_rank", node_rank),
        master_addr=said.get("master_addr", master_addr),
        master_port=said.get("master_port", master_port),
    )
    return run_script(
        script,
        arguments or [],
        config,
        meeting=meeting,
        log_dir=log_dir,
        address=address,
    )
