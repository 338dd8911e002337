"""`distlab.distributed`: its group, its primitives, its table, and all examples."""

from __future__ import annotations

import inspect
import os
import re
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import distlab.distributed as dist
from distlab.comm import MeetingError, PeerLost
from distlab.distributed.environment import read_place
from distlab.distributed.parts import TABLE, tasks, unit
from distlab.grading.kit.torchrun_env import like_torchrun
from distlab.runner import Cluster, Limits, RankContext

PATIENCE_S = 60.0
PATIENT = Limits(seconds=300)
AVG = dist.ReduceOp.AVG
METHODS = {
    "DistributedDataParallel": ("no_sync", "join", "zero_loss", "sync_gradients"),
    "PipelineParallel": ("clip_grad_norm_",),
    "TensorParallel": ("clip_grad_norm_",),
}


def documented() -> dict[str, str]:
    """The text of each public name, and of methods with their own example."""
    found = {name: inspect.getdoc(getattr(dist, name)) or "" for name in dist.__all__}
    for name, methods in METHODS.items():
        for method in methods:
            text = inspect.getdoc(getattr(getattr(dist, name), method)) or ""
            found[f"{name}.{method}"] = text
    return found


def examples() -> dict[str, str]:
    return {
        name: textwrap.dedent(text.split("Example:\n")[1])
        for name, text in documented().items()
        if "Example:\n" in text
    }


def test_every_public_name_has_an_example_and_a_row() -> None:
    assert set(examples()) == set(documented())
    assert set(TABLE) == set(dist.__all__)
    assert all(code.strip() for code in examples().values())


def run_examples(context: RankContext, backend: str, folder: str) -> list[str]:
    like_torchrun(context, PATIENCE_S)
    failed = []

    def init(given: str = backend, **named: Any) -> None:
        dist.init_process_group(given, **named)

    for name, code in examples().items():
        names = {public: getattr(dist, public) for public in dist.__all__}
        names |= {"torch": torch, "init_process_group": init}
        names["folder"] = f"{folder}/{name}"
        try:
            exec(compile(code, name, "exec"), names)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
        finally:
            dist.destroy_process_group()
    return failed


@pytest.mark.parametrize(
    ("n", "backend"),
    [
        pytest.param(1, "gloo", marks=pytest.mark.slow),
        (4, "gloo"),
        pytest.param(4, "tcp", marks=pytest.mark.slow),
    ],
)
def test_examples_run(cluster: Cluster, tmp_path: Path, n: int, backend: str) -> None:
    run = cluster.run(run_examples, n, backend, str(tmp_path), limits=PATIENT)
    assert run.require_finished().values == [[]] * n


# ── the place of a process, and its group ───────────────────────────────────────────

MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_slurms_variables_stand_in_for_torchruns() -> None:
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", **MEETING}
    place = read_place(environment=slurm)
    assert (place.rank, place.world_size, place.local_rank) == (5, 8, 1)
    assert place.address == ("10.0.0.1", 29500)
    torchrun = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}
    place = read_place(environment={**slurm, **torchrun})
    assert (place.rank, place.world_size, place.local_rank) == (2, 3, 0)
    step = {"SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "41", **slurm}
    del step["MASTER_ADDR"], step["MASTER_PORT"]
    assert read_place(environment=step).address == ("gpu07", 20041)
    place = read_place("tcp://[::1]:4000", 2, 1, environment={})
    assert (place.rank, place.address) == (1, ("::1", 4000))


NODE_OF_TWO = {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}
RESTARTED = {"TORCHELASTIC_RESTART_COUNT": "-1"}


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        ({}, {}, "no rank: neither RANK nor SLURM_PROCID is set"),
        ({"rank": 0}, {}, "no world_size: neither WORLD_SIZE nor SLURM_NTASKS"),
        ({"rank": 0, "world_size": 2}, {}, "MASTER_ADDR and MASTER_PORT must name"),
        ({"rank": 2, "world_size": 2}, {}, "rank 2 of 2: ranks count from 0"),
        ({"world_size": 1}, {"RANK": "x"}, "RANK=x is not an integer"),
        ({"rank": 0, "world_size": 1}, {"LOCAL_RANK": "x"}, "LOCAL_RANK=x is no"),
        ({"rank": 0, "world_size": 1}, {"LOCAL_RANK": "-3"}, "LOCAL_RANK=-3"),
        ({"rank": 0, "world_size": 1}, NODE_OF_TWO, "LOCAL_WORLD_SIZE=2"),
        ({}, {"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2"),
        ({"rank": 0, "world_size": 1}, RESTARTED, "TORCHELASTIC_RESTART_COUNT=-1"),
        ({"rank": 0, "world_size": 2}, {**MEETING, "MASTER_PORT": "70000"}, "70000"),
        ({"rank": 0, "world_size": 1, "init_method": "file:///f"}, {}, "choose env://"),
    ],
)
def test_a_place_that_cannot_be(
    arguments: dict[str, Any], environment: dict[str, str], said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        read_place(**arguments, environment=environment)


def test_the_launchers_backend_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTLAB_BACKEND", "tcp")
    dist.init_process_group(world_size=1, rank=0)
    try:
        assert dist.get_distributed_info()["backend"] == "tcp"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["mpi", "MPI?", "nccl"])
def test_a_backend_is_refused_in_one_line(backend: str) -> None:
    if backend == "nccl" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    named = f"backend (is )?'{re.escape(backend)}'"
    with pytest.raises(ValueError, match=named) as refusal:
        dist.init_process_group(backend, world_size=1, rank=0)
    assert "\n" not in str(refusal.value)
    assert not dist.is_initialized()


@pytest.mark.parametrize("backend", ["gloo", "tcp"])
def test_one_process_needs_no_environment(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="call init_process_group"):
        dist.all_reduce(torch.ones(1))
    dist.init_process_group(backend, world_size=1, rank=0)
    try:
        assert dist.all_reduce(torch.tensor([3.0])).item() == 3
        assert dist.get_distributed_info()["backend"] == backend
        with pytest.raises(RuntimeError, match="default group"):
            dist.init_process_group(backend, world_size=1, rank=0)
    finally:
        dist.destroy_process_group()


def disagrees(context: RankContext, backend: str) -> list[str]:
    like_torchrun(context, PATIENCE_S)
    said = []
    same = {"RANK": str(context.rank), "WORLD_SIZE": "2"}
    for number, (own, timeout_s) in enumerate(
        [
            ({"RANK": "1", "WORLD_SIZE": "3"}, PATIENCE_S),
            ({"WORLD_SIZE": str(2 + context.rank)}, PATIENCE_S),
            ({"WORLD_SIZE": "4"}, 2.0),
        ]
    ):
        # As after a restart, nothing that earlier ranks have set counts.
        generation = {"TORCHELASTIC_RESTART_COUNT": str(number)}
        os.environ.update(same | own | generation)
        try:
            dist.init_process_group(backend, timeout_s=timeout_s)
        except (ValueError, MeetingError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("backend", ["gloo", "tcp"])
def test_ranks_that_disagree_who_they_are_are_told_so(
    cluster: Cluster, backend: str
) -> None:
    expected = (
        r"ValueError: .*\brank 1\b.*RANK",
        r"ValueError: WORLD_SIZE is [23] on rank [01]\b.*[23] on rank [01]\b",
        r"MeetingError: .*ranks 2, 3\b.*WORLD_SIZE is 4\b",
    )
    for said in cluster.run(disagrees, 2, backend).require_finished().values:
        assert len(said) == len(expected), said
        for text, pattern in zip(said, expected, strict=True):
            assert re.match(pattern, text), text
            assert "\n" not in text


def waits_in_vain(context: RankContext, backend: str) -> list[int]:
    like_torchrun(context, PATIENCE_S)
    dist.init_process_group(backend, timeout_s=1.0)
    if context.rank == 1:
        context.comm.recv(torch.zeros(1), src=0)  # until rank 0 has given up
        return []
    try:
        dist.all_reduce(torch.ones(5))
    except PeerLost as error:
        context.comm.send(torch.zeros(1), dst=1)
        return [error.rank, error.peer]
    return []


@pytest.mark.parametrize("backend", ["gloo", "tcp"])
def test_timeout_s_limits_a_wait(cluster: Cluster, backend: str) -> None:
    run = cluster.run(waits_in_vain, 2, backend, limits=Limits(seconds=60))
    assert run.require_finished().values[0] == [0, 1]


# ── collectives ─────────────────────────────────────────────────────────────────────


def all_primitives(context: RankContext, backend: str) -> list[str]:
    """The names of those that do not give what torch's definition says."""
    like_torchrun(context, PATIENCE_S)
    dist.init_process_group(backend, timeout_s=PATIENCE_S)
    wrong = [*reductions(context.world_size, context.rank)]
    wrong += movements(context.world_size, context.rank)
    dist.barrier()
    dist.destroy_process_group()
    return wrong


def values_of(rank: int, n: int) -> Tensor:
    """Rank's own values, non-contiguous."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(-4, 5, (2 * n, 3), generator=generator)
    return values.double().T.contiguous().T


def differs(name: str, actual: Tensor, expected: Tensor) -> list[str]:
    return [] if torch.equal(actual, expected) else [name]


def reductions(n: int, rank: int) -> list[str]:
    wrong = []
    every = torch.stack([values_of(r, n) for r in range(n)])
    combined = {
        dist.ReduceOp.SUM: every.sum(0),
        dist.ReduceOp.AVG: every.sum(0) / n,
        dist.ReduceOp.MIN: every.amin(0),
        dist.ReduceOp.MAX: every.amax(0),
        dist.ReduceOp.PRODUCT: every.prod(0),
    }
    for op, total in combined.items():
        mine = values_of(rank, n)
        if dist.all_reduce(mine, op) is not mine:
            wrong.append("all_reduce returns its tensor")
        wrong += differs(f"all_reduce {op}", mine, total)
        reduced = dist.reduce(values_of(rank, n), dst=n - 1, op=op)
        expected = total if rank == n - 1 else values_of(rank, n)
        wrong += differs(f"reduce {op}", reduced, expected)
        chunk = dist.reduce_scatter(values_of(rank, n), op)
        wrong += differs(f"reduce_scatter {op}", chunk, total[2 * rank : 2 * rank + 2])
    half = torch.full((2 * n,), 40000.0, dtype=torch.float16)  # the sum is inf
    for call in (dist.all_reduce, dist.reduce_scatter):
        wrong += [] if (call(half.clone(), op=AVG) == 40000).all() else ["half mean"]
    model = torch.nn.Linear(2 * n, 1, bias=False).half()
    model.weight.grad = half.clone().view(1, -1)
    unit("trainer").average_gradients(dist.default_comm(), model)
    unit("ring_allreduce").all_reduce(dist.default_comm(), half, average=True)
    wrong += (
        [] if {*half.tolist(), *model.weight.grad[0].tolist()} == {4e4} else ["4e4"]
    )
    if not refuses(dist.all_reduce, torch.ones(2, dtype=torch.int64), AVG):
        wrong.append("the mean of integers")
    return wrong


def movements(n: int, rank: int) -> list[str]:
    every = torch.stack([values_of(r, n) for r in range(n)])
    rows = every[:, 2 * rank : 2 * rank + 2]
    mine, last = every[rank].clone(), n - 1
    wrong = differs("all_gather", torch.stack(dist.all_gather(mine)), every)
    gathered = dist.gather(mine, dst=last)
    if gathered is not None or rank == last:
        wrong += differs("gather", torch.stack(gathered or []), every)
    tensors = list(every) if rank == last else None
    wrong += differs("scatter", dist.scatter(mine * 0, tensors, src=last), every[rank])
    wrong += differs("all_to_all", dist.all_to_all(mine), rows.flatten(0, 1))
    wrong += differs("broadcast", dist.broadcast(mine, src=last), every[last])
    view = negated(rank, n)
    said = -torch.arange(1.0, n + 1)  # rank r's n elements are all -r - 1
    total = said.sum().expand(n)
    wrong += differs("reduce_scatter of a view", dist.reduce_scatter(view), total[:1])
    wrong += differs("gathered views", torch.stack(dist.all_gather(view))[:, 0], said)
    wrong += differs("all_to_all of a view", dist.all_to_all(view), said)
    wrong += differs("all_reduce of a view", dist.all_reduce(view), total)
    broadcast = dist.broadcast(negated(rank, n), last)
    wrong += differs("broadcast of a view", broadcast, said[last].expand(n))
    for bad in (torch.ones(1).to_sparse(), torch.ones(1).expand(3)):
        if not refuses(dist.all_reduce, bad) or not refuses(dist.broadcast, bad):
            wrong.append(f"written: {bad.layout} {bad.shape}")
    if not refuses(dist.broadcast, torch.ones(1), n):
        wrong.append("broadcast from a rank that does not exist")
    for call in (dist.reduce_scatter, dist.all_to_all):
        if n > 1 and not refuses(call, torch.ones(n + 1)):
            wrong.append(f"{call.__name__} of {n + 1} rows")
    return wrong


def negated(rank: int, n: int) -> Tensor:
    """n times -rank - 1, as a view of memory with rank + 1."""
    return torch.full((n,), complex(1, rank + 1)).conj().imag


def refuses(call: Callable[..., object], *arguments: Any) -> bool:
    try:
        call(*arguments)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize(
    ("n", "backend"),
    [
        (3, "gloo"),
        (4, "tcp"),
        pytest.param(1, "gloo", marks=pytest.mark.slow),
        pytest.param(3, "tcp", marks=pytest.mark.slow),
    ],
)
def test_primitives_produce_what_they_should(
    cluster: Cluster, n: int, backend: str
) -> None:
    run = cluster.run(all_primitives, n, backend, limits=PATIENT)
    assert run.require_finished().values == [[]] * n


class Allocated(TorchDispatchMode):
    """Counts the bytes of new, empty tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.new_empty):
            self.num_bytes += result.nbytes
        return result


def allocates(_: RankContext) -> dict[str, int]:
    dist.init_process_group(world_size=1, rank=0)
    found = {}
    for name, scope in {"pool": dist.memory_pool_scope, "none": nullcontext}.items():
        with scope(), Allocated() as allocated:
            for _ in range(10):
                dist.all_reduce(torch.ones(1000), dist.ReduceOp.MAX)
        found[name] = allocated.num_bytes
    dist.destroy_process_group()
    return found


def test_memory_pool_scope_allocates_once(cluster: Cluster) -> None:
    (found,) = cluster.run(allocates, 1, limits=PATIENT).require_finished().values
    assert found == {"pool": 4000, "none": 40_000}


# ── whose code runs ─────────────────────────────────────────────────────────────────


def test_the_table_names_tasks_of_the_course() -> None:
    info = dist.get_distributed_info()
    assert not info["initialized"]
    assert info["units"] == [
        {"number": p.number, "task": p.task, "whose": p.whose, "digest": p.digest}
        for p in tasks()
    ]
    listed = {row["task"] for row in info["units"]}
    assert listed == {task for names in TABLE.values() for task in names}


# ── ranks that make different calls ─────────────────────────────────────────────────


def pairs_of_calls(rank: int) -> dict[str, tuple[Callable[[], Any], str]]:
    """What each rank calls, and what the error names."""
    long = torch.zeros(2 + 2 * rank)
    other = torch.zeros(2, dtype=torch.int32 if rank else torch.float32)
    rows = torch.zeros(2 + 2 * rank, 4 - 2 * rank)
    op = dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM
    row = torch.zeros(2)
    return {
        "size": (lambda: dist.all_reduce(long), r"all_reduce.*\(2,\).*\(4,\)"),
        "dtype": (lambda: dist.all_reduce(other), r"float32, SUM.*int32, SUM"),
        "op": (lambda: dist.all_reduce(row, op), r"SUM.*MAX"),
        "shape": (lambda: dist.all_gather(rows), r"\(2, 4\).*\(4, 2\)"),
        "root": (lambda: dist.broadcast(row, rank), r"src=0.*src=1"),
        "reduce": (lambda: dist.reduce(row, rank), r"dst=0.*dst=1"),
        "gather": (lambda: dist.gather(long), r"gather.*\(2,\).*\(4,\)"),
        "reduce_scatter": (lambda: dist.reduce_scatter(long), r"\(2,\).*\(4,\)"),
        "all_to_all": (lambda: dist.all_to_all(long), r"\(2,\).*\(4,\)"),
        "scatter": (lambda: dist.scatter(row, [row], src=0), r"\b2 .*\(2,\)"),
        "name": (
            lambda: dist.barrier() if rank else dist.all_reduce(row),
            r"all_reduce\(.*barrier\(\)",
        ),
        "message": (
            lambda: dist.recv(row[:1].double(), 0) if rank else dist.send(row, 1),
            r"^$|2 elements of torch\.float32 .*\b1 element of torch\.float64",
        ),
        "longer": (
            lambda: dist.recv(row) if rank else dist.send(torch.zeros(4), 1),
            r"^$|4 elements.*\b2 elements",
        ),
    }


def disagree(context: RankContext, backend: str) -> dict[str, str]:
    like_torchrun(context, PATIENCE_S)
    dist.init_process_group(backend, timeout_s=PATIENCE_S)
    found = {}
    for name, (call, _) in pairs_of_calls(context.rank).items():
        found[name] = ""
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    assert dist.all_reduce(torch.ones(1)).item() == 2  # nothing is left over
    return found


@pytest.mark.parametrize("backend", ["gloo", "tcp"])
def test_calls_that_differ_are_named_with_their_lines(
    cluster: Cluster, backend: str
) -> None:
    run = cluster.run(disagree, 2, backend, limits=PATIENT).require_finished()
    for rank, found in enumerate(run.values):
        for name, (_, pattern) in pairs_of_calls(0).items():
            assert re.search(pattern, found[name]), (name, found[name])
            is_silent = not rank and name in ("message", "longer")
            assert (found[name] == "") == is_silent
        for name in ("size", "name", "root"):
            assert len(re.findall(r"\btest_distributed\.py:\d+", found[name])) == 2


def cannot_be_sent(rank: int) -> dict[str, Callable[[], Any]]:
    """What rank 1 gets wrong, beside a call of rank 0 that is right."""
    row = torch.ones(2)
    with torch.inference_mode():
        fixed = torch.ones(2)
    return {
        "list": lambda: dist.all_gather([row] if rank else row),  # type: ignore[arg-type]
        "meta": lambda: dist.broadcast(row.to("meta") if rank else row),
        "quantized": lambda: dist.all_reduce(
            torch.quantize_per_tensor(row, 0.1, 0, torch.quint8) if rank else row
        ),
        "nested": lambda: dist.gather(
            torch.nested.nested_tensor([row], layout=torch.jagged) if rank else row
        ),
        "sparse": lambda: dist.all_gather(row.to_sparse() if rank else row),
        "made in inference_mode": lambda: dist.all_reduce(fixed if rank else row),
        "one element for two": lambda: dist.broadcast(
            row[:1].expand(2) if rank else row
        ),
        "of the root": lambda: dist.reduce(row[:1].expand(2) if rank else row, dst=1),
        "op": lambda: dist.all_reduce(row, "sum" if rank else dist.ReduceOp.SUM),  # type: ignore[arg-type]
        "no such sum": lambda: dist.all_reduce(row.to(torch.float8_e5m2)),
        "no such maximum": lambda: dist.reduce_scatter(row * 1j, dist.ReduceOp.MAX),
        "rank": lambda: dist.broadcast(row, None if rank else 0),  # type: ignore[arg-type]
    }


def refused_together(context: RankContext, backend: str) -> dict[str, str]:
    like_torchrun(context, PATIENCE_S)
    dist.init_process_group(backend, timeout_s=PATIENCE_S)
    found = {}
    for name, call in cannot_be_sent(context.rank).items():
        try:
            found[name] = f"returned {call()}"
        except Exception as error:
            found[name] = "" if isinstance(error, ValueError) else repr(error)
    assert dist.all_reduce(torch.ones(1)).item() == 2  # nothing is left over
    return found


@pytest.mark.parametrize("backend", ["gloo", "tcp"])
def test_a_tensor_that_cannot_be_sent_is_refused_on_every_rank(
    cluster: Cluster, backend: str
) -> None:
    run = cluster.run(refused_together, 2, backend, limits=PATIENT).require_finished()
    for found in run.values:
        assert {name: what for name, what in found.items() if what} == {}
