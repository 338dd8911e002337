"""Two tables that your functions of unit `planning` fill: degrees, and goodput.

The model is Llama 3 70B, and the GPUs are those of DGX H100 nodes. `distlab plan` has
more models and clusters, with the sources of their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from distlab.given.planning import (
    Batch,
    Cluster,
    Degrees,
    Goodput,
    Link,
    Model,
    Recovery,
)

LLAMA_70B = Model(
    layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128_256
)
BATCH = Batch(sequence=8192, global_batch=512)  # 4 million tokens
DGX_H100 = Cluster(
    gpus_per_node=8,
    peak_flops=989.4e12,
    memory_bytes=80e9,
    memory_bytes_per_s=3.35e12,
    intra_node=Link(alpha_s=3e-6, bytes_per_s=450e9),
    inter_node=Link(alpha_s=5e-6, bytes_per_s=50e9),
    matmul_efficiency=0.4644,
    price_per_gpu_hour=2.5,
    gpu_mtbf_s=50_667 * 3600.0,
)
DAY_S = 24 * 3600.0


def show_degrees(
    useful_degrees: Callable[[Model, Batch, Cluster, int, float], Degrees],
) -> None:
    """Print the largest useful degree of each axis, within nodes and between them."""
    print("Llama 3 70B, 4 million tokens per step, 16 microbatches, bubble of 10 %")
    for name, cluster in (
        ("DGX H100", DGX_H100),
        ("no NVLink", replace(DGX_H100, intra_node=DGX_H100.inter_node)),
    ):
        most = useful_degrees(LLAMA_70B, BATCH, cluster, 16, 0.1)
        print(
            f"  {name:9}  data {most.data:6.1f}  tensor {most.tensor:5.1f}  "
            f"context {most.context:5.1f}  pipeline {most.pipeline:4.1f}"
        )


def recovery_with(save_s: float, spare_nodes: int) -> Recovery:
    """Return what recovery takes: 60 s to detect, 300 s to restart, a day to repair."""
    return Recovery(
        save_s=save_s,
        detection_s=60.0,
        restart_s=300.0,
        repair_s=DAY_S,
        spare_nodes=spare_nodes,
    )


def show_goodput(
    goodput: Callable[[Cluster, int, Recovery, float], Goodput],
) -> None:
    """Print what failures make of 30 days, for jobs of several sizes."""
    print("30 days of training on DGX H100")
    print("    GPUs  save  spare nodes  failure every  saved every  goodput     price")
    for num_gpus, save_s, spare_nodes in (
        (64, 60.0, 0),
        (1024, 60.0, 0),
        (1024, 60.0, 2),
        (16_384, 60.0, 2),
        (16_384, 60.0, 16),
        (16_384, 5.0, 16),
    ):
        recovery = recovery_with(save_s, spare_nodes)
        plan = goodput(DGX_H100, num_gpus, recovery, 30 * DAY_S)
        print(
            f"  {num_gpus:6,}  {save_s:2.0f} s  {spare_nodes:11}  "
            f"{plan.mtbf_s / 3600:11.1f} h  {plan.interval_s / 60:7.0f} min  "
            f"{plan.share:7.1%}  ${plan.price / 1e6:5.2f} M"
        )
