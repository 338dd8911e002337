"""What MLSys·im and llm-analysis predict for the runs of `distlab bench plan`.

Both are planners that others have published. Neither belongs to our environment, so
each takes part if it can be imported:

    pip install mlsysim==0.3.0 llm-analysis==0.2.2

They are told what our formulas are told: the shape of the model, the layout, and the
cluster's peaks, links and matmul_efficiency. (Both take an efficiency as an argument.)
In return they say how long a step takes. From that we compute the MFU as we do for our
own formulas, so all predictions mean the same.

MLSys·im's DistributedModel adds messages and bubble to the time of 6 operations per
weight and token, or 8 if the layers are recomputed. llm-analysis' LLMAnalysis.training
counts operations only, and divides them by the attained FLOP/s.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from distlab.given.planning import RECOMPUTE, Layout
from distlab.plan.plans import Question

StepTimer = Callable[[Question, Layout, int], float]
"""The seconds of a step. The last argument is the number of weights of the model."""


class NotModeledError(ValueError):
    """A planner has no notion of something that a run uses."""


def available() -> tuple[dict[str, StepTimer], dict[str, str]]:
    """Return the planners that can be imported, and why the others can't, by name."""
    timers: dict[str, StepTimer] = {}
    missing: dict[str, str] = {}
    for name, (package, module, timer) in _PLANNERS.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            missing[name] = f"{error}; pip install {package}"
            continue
        timers[name] = timer
    return timers, missing


def version_of(name: str) -> str:
    """Return the version of a planner that is installed."""
    return version(_PLANNERS[name][0])


def mlsysim_step_s(question: Question, layout: Layout, parameters: int) -> float:
    """Return MLSys·im's seconds of a step.

    It may hide messages of data parallelism behind computation, as all published runs
    do. It has one kind of recomputation, which is that of whole layers.

    Raises:
        NotModeledError: the layout has context parallelism.
    """
    if layout.context > 1:
        raise NotModeledError("it has no context parallelism")
    units = importlib.import_module("mlsysim.core.units")
    hardware = importlib.import_module("mlsysim.hardware.types")
    systems = importlib.import_module("mlsysim.systems.types")
    models = importlib.import_module("mlsysim.models.types")
    solvers = importlib.import_module("mlsysim.solvers")

    def quantity(value: float, unit: str) -> Any:
        return units.Q_(value, unit)

    model, batch, cluster = question.model, question.batch, question.cluster
    peak = quantity(cluster.peak_flops, "flop/s")
    inside, between = cluster.intra_node, cluster.inter_node
    gpus_per_node = min(cluster.gpus_per_node, question.num_gpus)
    gpu = hardware.HardwareNode(
        name="GPU",
        release_year=2020,
        compute=hardware.ComputeCore(peak_flops=peak, precision_flops={"fp16": peak}),
        memory=hardware.MemoryHierarchy(
            capacity=quantity(cluster.memory_bytes, "byte"),
            bandwidth=quantity(cluster.memory_bytes_per_s, "byte/s"),
        ),
        nvlink=hardware.IOInterconnect(
            name="inside a node",
            bandwidth=quantity(inside.bytes_per_s, "byte/s"),
            latency=quantity(inside.alpha_s, "s"),
        ),
    )
    fleet = systems.Fleet(
        name="cluster",
        count=question.num_gpus // gpus_per_node,
        node=systems.Node(
            name="node",
            accelerator=gpu,
            accelerators_per_node=gpus_per_node,
            intra_node_bw=quantity(inside.bytes_per_s, "byte/s"),
        ),
        fabric=systems.NetworkFabric(
            name="between nodes",
            bandwidth=quantity(between.bytes_per_s, "byte/s"),
            latency=quantity(between.alpha_s, "s"),
        ),
    )
    workload = models.TransformerWorkload(
        name="model",
        architecture="Transformer",
        parameters=quantity(parameters, "count"),
        layers=model.layers,
        hidden_dim=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
    )
    result = solvers.DistributedModel().solve(
        workload,
        fleet,
        batch_size=batch.global_batch,
        seq_len=batch.sequence,
        efficiency=cluster.matmul_efficiency,
        tp_size=layout.tensor,
        pp_size=layout.pipeline,
        v_stages=layout.chunks,
        microbatch_count=layout.microbatches(batch),
        zero_stage=layout.zero_stage,
        activation_recomputation=layout.recompute == "full",
        overlap_comm=True,
    )
    return float(result.step_latency_total.m_as("s"))


def llm_analysis_step_s(question: Question, layout: Layout, parameters: int) -> float:
    """Return llm-analysis' seconds of a step. It counts the weights itself.

    Raises:
        NotModeledError: the layout has context parallelism.
    """
    if layout.context > 1:
        raise NotModeledError("it has no context parallelism")
    analysis = importlib.import_module("llm_analysis.analysis")
    config = importlib.import_module("llm_analysis.config")
    importlib.import_module("llm_analysis.logger").logger.setLevel(logging.ERROR)
    model, batch, cluster = question.model, question.batch, question.cluster
    planner = analysis.LLMAnalysis(
        config.ModelConfig(
            name="model",
            num_layers=model.layers,
            n_head=model.heads,
            hidden_dim=model.hidden,
            vocab_size=model.vocab,
            max_seq_len=batch.sequence,
            num_key_value_heads=model.kv_heads,
            ffn_embed_dim=model.ffn,
            expansion_ratio=model.ffn / model.hidden,
        ),
        config.GPUConfig(
            name="GPU",
            mem_per_GPU_in_GB=cluster.memory_bytes / 1e9,
            hbm_bandwidth_in_GB_per_sec=cluster.memory_bytes_per_s / 1e9,
            intra_node_bandwidth_in_GB_per_sec=cluster.intra_node.bytes_per_s / 1e9,
            intra_node_min_message_latency=cluster.intra_node.alpha_s,
            peak_fp16_TFLOPS=cluster.peak_flops / 1e12,
            inter_node_bandwidth_in_GB_per_sec=cluster.inter_node.bytes_per_s / 1e9,
        ),
        config.DtypeConfig(),
        config.ParallelismConfig(
            tp_size=layout.tensor,
            pp_size=layout.pipeline,
            dp_size=layout.data,
            sp_size=layout.tensor if layout.sequence_parallel else 1,
        ),
        flops_efficiency=cluster.matmul_efficiency,
        hbm_memory_efficiency=1.0,
    )
    found = planner.training(
        batch_size_per_gpu=layout.microbatch,
        global_batch_size=batch.global_batch,
        seq_len=batch.sequence,
        activation_recomputation=analysis.ActivationRecomputation(
            RECOMPUTE.index(layout.recompute)
        ),
        ds_zero=analysis.DSZeRO(layout.zero_stage),
        mlp_gated_linear_units=model.gated,
    )
    return float(found["latency_per_iter"])


_PLANNERS: dict[str, tuple[str, str, StepTimer]] = {
    "MLSys·im": ("mlsysim", "mlsysim.solvers", mlsysim_step_s),
    "llm-analysis": ("llm-analysis", "llm_analysis.analysis", llm_analysis_step_s),
}
"""By name: the package on PyPI, a module of it, and what asks it for a step."""
