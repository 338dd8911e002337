"""Each call that users arrive with is one that our function takes, by its arguments.

What the calls do is the business of the tests of each room. Here a sample is read, its
function is looked up and its arguments are bound, so that no name gets lost.
"""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest

import distlab.distributed as dist
from distlab import engines, launch, tutor

DISTRIBUTED = """
init_process_group("gloo")
init_process_group(backend="nccl", init_method="env://", world_size=2, rank=0)
init_process_group("tcp", world_size=1, rank=0, timeout_s=60)
destroy_process_group()
is_initialized()
get_rank()
get_world_size()
get_distributed_info()
default_comm()
all_reduce(t, op=ReduceOp.SUM)
broadcast(t, src=0)
all_gather(t)
reduce_scatter(t, ReduceOp.AVG)
reduce(t, dst=0)
gather(t, dst=0)
scatter(chunks, src=0)
all_to_all(chunks)
barrier()
send(t, dst=1)
recv(t, src=0)
DistributedDataParallel(module)
DistributedDataParallel(module, comm, bucket_size_mib=25, find_unused_parameters=True)
DistributedDataParallel(module, bucket_size_mb=25)
DistributedDataParallel(module, device_ids=[0], bucket_cap_mb=25)
no_sync()
sync_gradients()
DistributedSampler(dataset, num_replicas=2, rank=0, shuffle=True, seed=0)
DistributedSampler(dataset_size=10, drop_last=False)
checkpoint_scope()
memory_pool_scope()
"""

ENGINES = """
DistributedConfig(num_gpus=8, num_nodes=2, gpus_per_node=4, backend="ray")
DistributedConfig(zero_stage=3)
DistributedConfig(tensorboard_dir="runs")
DistributedConfig(deepspeed_config="ds.json")
PyTorchDDPTrainer(model, num_gpus=4, epochs=3)
PyTorchDDPTrainer(model, optimizer=optimizer, scheduler=scheduler)
PyTorchDDPTrainer.fit(trainer, train_loader, val_loader, epochs=3)
PyTorchDDPTrainer.fit(trainer, loader, loader, "checkpoints", "experiment", 100)
HorovodTrainer(model, optimizer, loss_fn, verbose=True, compression="fp16")
HorovodTrainer(model, optimizer, loss_fn, False, timeline="timeline.json")
HorovodTrainer.metric_average(value, "loss")
RayTrainer(model, {"num_gpus": 2, "epochs": 3})
RayTrainer(model, config, address="ray://head:10001")
DeepSpeedTrainer(model, deepspeed_config={"zero_optimization": {"stage": 2}})
TensorFlowDistributedTrainer(model, num_gpus=2, epochs=3)
TensorFlowDistributedTrainer.fit(trainer, dataset, dataset)
DistributedTuner(train_fn, search_space, num_gpus=2, trials_per_gpu=2)
DistributedTuner.tune(tuner, num_samples=8)
"""

LAUNCH = """
LaunchConfig(nproc_per_node=2, nnodes=2, node_rank=0, master_addr="a", master_port=1)
LaunchConfig(backend="gloo", max_restarts=3, monitor_interval=1, start_timeout=9)
DistributedLauncher(config)
DistributedLauncher.launch(launcher, "train.py", "--epochs", "3")
launch_distributed_training("train.py", "--epochs", "3", nproc_per_node=2)
"""

TUTOR = """
run_ddp_simulation(world_size=2, epochs=1, batch_size=8, lr=0.1)
explain_ddp_concepts()
explain_ddp_concepts("what is a bucket?")
compare_ddp_vs_single()
get_tools()
"""

ROOMS = {
    "distributed": (dist, DISTRIBUTED),
    "engines": (engines, ENGINES),
    "launch": (launch, LAUNCH),
    "tutor": (tutor, TUTOR),
}
SAMPLES = [
    (room, line)
    for room, (_, text) in ROOMS.items()
    for line in text.strip().splitlines()
]


def bind(room: Any, line: str) -> None:
    """Look the function of a call up, and give it as many arguments.

    Raises:
        AttributeError, TypeError: there is none, or it takes others.
    """
    call = ast.parse(line, mode="eval").body
    assert isinstance(call, ast.Call)
    function = room
    for name in ast.unparse(call.func).split("."):
        function = getattr(function, name)
    named = {str(one.arg): ast.unparse(one.value) for one in call.keywords}
    bound = inspect.signature(function).bind(*call.args, **named)
    assert isinstance(bound, inspect.BoundArguments)


@pytest.mark.parametrize(("room", "line"), SAMPLES, ids=[s[1] for s in SAMPLES])
def test_a_sample_that_users_arrive_with_fits(room: str, line: str) -> None:
    bind(ROOMS[room][0], line)


@pytest.mark.parametrize(
    ("line", "error"),
    [("get_ranks()", AttributeError), ("barrier(1, 2, 3, 4, 5)", TypeError)],
)
def test_a_sample_that_does_not_fit_is_found(line: str, error: Any) -> None:
    with pytest.raises(error):
        bind(dist, line)
