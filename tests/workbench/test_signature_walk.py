"""No parameter of a task has one and the same value in all that its clauses play."""

from __future__ import annotations

import pytest

from distlab.curriculum import Task
from distlab.grading.clause import checks_of, modules_of
from distlab.grading.harness import Implementation, PlayedRuns
from distlab.grading.preflight import look_at
from distlab.grading.runs import RunSpec
from distlab.runner import Cluster, Limits
from tests.workbench.judging import CURRICULUM, SEED, UNITS
from tests.workbench.signature_walk import Noted, looks_like, values_passed

CONSTANT = {
    "given code reads it, the task's own does not": (
        "distributed_data_parallel.hooks: DistributedDataParallel.__init__("
        "broadcast_buffers find_unused_parameters)",
        "distributed_data_parallel.finish: DistributedDataParallel.__init__("
        "broadcast_buffers find_unused_parameters bucket_size_mib comm_hook)",
        "distributed_data_parallel.unused: DistributedDataParallel.__init__("
        "broadcast_buffers find_unused_parameters comm_hook)",
        "parameter_server.exactly_once: DurableServer.__init__(weights num_workers lr)",
        "gradient_compression.top_k: TopK.__init__(ratio)",
    ),
    "it is replaced on the object": (
        "distributed_data_parallel.hooks: DistributedDataParallel.__init__(comm_hook)",
    ),
    "no code could come upon this value by itself": (
        "parameter_server.sync: SyncServer.__init__(weights lr)",
        "parameter_server.staleness: StaleServer.__init__(weights lr)",
        "recovery.supervise: Supervisor.__init__(grace_s)",
        "torch_ports.data_parallel: data_parallel(bucket_mib)",
        "torch_ports.groups: meet(host timeout_s)",
        "torch_ports.hybrid_shard: save(folder)",
        "torch_ports.hybrid_shard: load(folder)",
        "fault_tolerance.save: write_file(name)",
        "trainer.main: main(path)",
        "trainer.fit: fit(num_epochs)",
        "imagenet_trainer.compose: fit(num_epochs)",
        "gradient_compression.powersgd: PowerSGD.__init__(rank)",
        "checkpoint_port.saver: Saver.save(own)",
        "checkpoint_port.saver: load(own)",
        "activation_checkpointing.checkpoint: set_random_state(state)",
    ),
    "batches of other sizes are the subject of a later task": (
        "trainer.train_step: train_step(inputs targets)",
        "mixed_precision.port: with_torch(inputs targets)",
    ),
    "it passes through, and nothing reads its form": (
        "mixed_precision.loss_scaler: LossScaler.scale(loss)",
        "monitoring.suspects: reduce_gradients(gradients)",
        "tensor_parallel.vocab_loss: vocab_parallel_cross_entropy(targets)",
    ),
    "None is the first stage's or the last one's; other runs are simulated": (
        "pipeline_parallel.forward_backward: forward_step(source destination)",
        "pipeline_parallel.forward_backward: backward_step(source destination)",
    ),
}
"""Parameters that may have one value: why nothing is missed."""

ALLOWED = {
    f"{function}({parameter})"
    for lines in CONSTANT.values()
    for line in lines
    for function, _, names in [line.removesuffix(")").rpartition("(")]
    for parameter in names.split()
}

MOST_RANKS = 4
SECONDS = 60.0


def passed_in(cluster: Cluster, task: Task) -> Noted:
    """Every parameter of the task's functions, with up to two of its values a rank."""
    cluster.warm(*UNITS[task.unit].preload, *modules_of(task.unit))
    ready = look_at(CURRICULUM, task, "reference")[1]
    assert ready
    impl = Implementation(ready.source, ready.reference, ready.unfinished)
    checks, noted, played = checks_of(task.id), Noted(), set[RunSpec]()
    sizes = sorted({n for check in checks for n in check.worlds})
    for size in [n for n in sizes if n <= MOST_RANKS][::-1] or sizes[:1]:
        own = [check for check in checks if size in check.worlds]
        plans = [spec for c in own for plan in (c.runs, c.later) for spec in plan(size)]
        specs = {spec for spec in plans if spec.network is None}
        if not constant_in(noted, task):
            specs -= played  # with fewer ranks they would tell nothing new
        played |= specs
        runs = PlayedRuns(cluster, impl, size, SEED, Limits(seconds=SECONDS))
        for spec in sorted(specs, key=str):  # by itself: some leave a broken group
            run = runs.on_ranks(values_passed, (spec,))
            for value in run.values if run.outcome == "finished" else ():
                for parameter, values in value.items():
                    noted.setdefault(parameter, []).extend(values)
    return noted


def constant_in(noted: Noted, task: Task) -> dict[str, str]:
    """The parameters that were always passed one value, and may not be."""
    return {
        parameter: values[0]
        for parameter, values in noted.items()
        if len(set(values)) == 1 and f"{task.id}: {parameter}" not in ALLOWED
    }


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS)
def test_each_parameter_is_passed_with_several_values(
    cluster: Cluster, unit: str
) -> None:
    constant = {
        f"{task.id}: {parameter} is always {value}"
        for task in UNITS[unit].tasks
        for parameter, value in constant_in(passed_in(cluster, task), task).items()
    }
    assert not constant, "\n".join(sorted(constant))


def test_an_excuse_names_a_task() -> None:
    ids = {task.id for task in CURRICULUM.tasks}
    assert {name.partition(":")[0] for name in ALLOWED} <= ids


def test_what_counts_as_another_value() -> None:
    import torch

    row = torch.zeros(2, 3)
    told = [3, 3.0, None, "a", row, row.double(), row.t(), [1], [1, 2], [row], []]
    assert len({looks_like(value) for value in told}) == len(told)
    assert looks_like(torch.nn.ReLU()) == ""
