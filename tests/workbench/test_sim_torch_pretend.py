"""Scripts for GPUs on simulated ranks, and calls that reach out of a process."""

from __future__ import annotations

import atexit
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from distlab.sim import SimRun
from distlab.sim.torch.rank import Rank
from distlab.sim.torch.script import Script, run_script

GPU = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig, FullyShardedDataParallel, StateDictType)
from torch.nn.parallel import DistributedDataParallel

local = int(os.environ["LOCAL_RANK"])
device = torch.device(f"cuda:{local}")
torch.cuda.set_device(local)
dist.init_process_group("nccl", device_id=device)
assert torch.cuda.is_available() and torch.accelerator.is_available()
assert torch.cuda.current_device() == local
assert torch.cuda.device_count() == 2 == torch.accelerator.device_count()
assert dist.get_backend() == "nccl" and torch.cuda.is_bf16_supported()
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).to(device)
model = DistributedDataParallel(model, device_ids=[local], output_device=local)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scaler = torch.amp.GradScaler("cuda")
side, begin, end = torch.cuda.Stream(), *(
    torch.cuda.Event(enable_timing=True) for _ in range(2))
generator = torch.Generator(device="cuda").manual_seed(0)
assert isinstance(generator, torch.Generator)
with torch.cuda.device(local), torch.device("cuda"):
    inputs = torch.randn(4, 8, generator=generator)
targets = torch.tensor([0, 1, 0, 1], device="cuda").pin_memory().cuda(non_blocking=True)
side.wait_stream(torch.cuda.current_stream())
begin.record()
with torch.autocast("cuda", dtype=torch.bfloat16), torch.cuda.stream(side):
    loss = nn.functional.cross_entropy(model(inputs), targets)
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer), scaler.update()
end.record(), torch.cuda.synchronize(), torch.cuda.empty_cache()
assert begin.elapsed_time(end) > 0
assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated() > 500
assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] > 500
copy = {name: value.cpu() for name, value in model.module.state_dict().items()}
with torch.no_grad():
    model.module[0].weight.zero_()
assert copy["0.weight"].abs().sum() > 0
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
assert mesh["shard"].size() == 2
torch.accelerator.device_index(local)
sharded = FullyShardedDataParallel(nn.Linear(8, 8).to(local), device_id=local)
sharded(torch.ones(2, 8).to(local)).sum().backward()
settings = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
kind = StateDictType.FULL_STATE_DICT
with FullyShardedDataParallel.state_dict_type(sharded, kind, settings):
    whole = sharded.state_dict()
    step = torch.optim.Adam(sharded.parameters())
    step.step()
    FullyShardedDataParallel.optim_state_dict(sharded, step)
assert dist.get_rank() or whole["weight"].sum().isfinite()

@torch.jit.script
def scripted(x: torch.Tensor):
    return x + torch.tensor(1.0)

assert scripted(torch.zeros(1)) == 1
whole = torch.tensor([-7, 7], device="cuda") * (dist.get_rank() == 0)
dist.all_reduce(whole, op=dist.ReduceOp.AVG)
assert whole.tolist() == [-1, 1]
graph: torch.cuda.CUDAGraph | None = None
assert isinstance(torch.cuda.CUDAGraph, type)
dist.barrier(device_ids=[local])
if dist.get_rank() == 0:
    torch.save(copy, "weights.pt")
dist.barrier()
loaded = torch.load("weights.pt", map_location={"cuda:0": f"cuda:{local}"})
model.module.load_state_dict(loaded)
dist.destroy_process_group()
"""
PROCESS = """
import atexit, os, signal, sys, time
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from time import perf_counter
from torch.utils.data import DataLoader

dist.init_process_group("cpu:gloo,cuda:nccl")
rank = dist.get_rank()
signal.signal(signal.SIGTERM, lambda *args: None)
atexit.register(print, "at the end of", rank)
began = perf_counter()
time.sleep(5 + rank)
dist.barrier()
assert 7 <= perf_counter() - began < 7.1 and time.time() > 1e9
store = dist.TCPStore("localhost", 1234, 3, rank == 0)
if rank == 0:
    store.set("key", "value")
assert store.get("key") == b"value"
layer = torch.compile(torch.nn.Linear(2, 2))
assert torch.compile(mode="max-autotune")(len) is len
batches = list(DataLoader(range(8), batch_size=2, num_workers=100, pin_memory=True))
assert len(batches) == 4
saving = dcp.async_save({"layer": layer.state_dict()}, checkpoint_id="checkpoint")
saving.result()
dist.barrier()
dcp.load({"layer": layer.state_dict()}, checkpoint_id="checkpoint")
"""
REFUSED = {
    "mp.spawn": "import torch.multiprocessing as mp\nmp.spawn(print, (), 3)",
    "process": "import multiprocessing as mp\nmp.Process(target=print).start()",
    "socket": "import socket\nwith socket.socket() as s:\n    s.listen()",
    "cpp_extension": (
        "from torch.utils import cpp_extension\ncpp_extension.load_inline('fast', '')"
    ),
    "CUDA graph": "import torch\ntorch.cuda.CUDAGraph()",
}


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimRun]:
    monkeypatch.chdir(tmp_path)

    def play(text: str, n: int, **options: object) -> SimRun:
        Path("program.py").write_text(text)
        return run_script(Script("program.py"), n, **options)  # type: ignore[arg-type]

    return play


@pytest.mark.filterwarnings("ignore")  # those of torch about its own calls
def test_a_script_for_gpus_finds_one_on_each_rank(play: Callable[..., SimRun]) -> None:
    ranks: list[Rank] = []
    before = [torch.Tensor.to, torch.cuda.Stream, torch.Generator, torch.version.cuda]
    has_gpu = torch.cuda.is_available()  # a build for CUDA may find none
    done = play(GPU, 4, per_node=2, on_rank=ranks.append)
    assert done.outcome == "finished", done.ranks[0].output
    after = [torch.Tensor.to, torch.cuda.Stream, torch.Generator, torch.version.cuda]
    assert after == before
    assert torch.cuda.is_available() == has_gpu
    assert all(rank.tally.peak > 500 for rank in ranks)


def test_a_node_has_as_many_devices_as_ranks(play: Callable[..., SimRun]) -> None:
    text = "import os, torch\ntorch.cuda.set_device(int(os.environ['RANK']))"
    done = play(text, 4, per_node=2)
    assert [r.status for r in done.ranks] == [*["finished"] * 2, *["raised"] * 2]
    text = """
import os, torch
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(f"cuda:{rank}")
assert torch.cuda.current_device() == min(rank, 254)
for device in (torch.device("cuda", rank), torch.device(f"cuda:{rank}")):
    assert torch.device("cuda", device.index) == device
"""
    assert play(text, 256).outcome == "finished"
    text = "import torch\nassert not torch.cuda.is_available()"
    assert play(text, 2, device="cpu").outcome == "finished"


def test_a_rank_reaches_out_as_if_alone(play: Callable[..., SimRun]) -> None:
    ranks: list[Rank] = []
    before = [time.time, time.sleep, signal.signal, atexit.register, torch.compile]
    done = play(PROCESS, 3, on_rank=ranks.append)
    assert done.outcome == "finished", done.ranks[0].output
    after = [time.time, time.sleep, signal.signal, atexit.register, torch.compile]
    assert after == before
    for rank in ranks:
        assert done.ranks[rank.number].output == f"at the end of {rank.number}\n"
        assert len(rank.notes) == 2  # the workers and the compiler that it does without
    assert 7 < done.time_s < 7.1


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_simulated_is_refused(
    play: Callable[..., SimRun], kind: str
) -> None:
    done = play(REFUSED[kind], 2)
    error = done.ranks[0].error
    assert error is not None
    assert error.type == "Refused"
    assert done.ranks[0].output == ""  # a sentence says it better than a traceback
    own = [line for file, line in error.frames if file == "program.py"]
    assert own == [len(REFUSED[kind].splitlines())]


def test_spawned_processes_are_the_ranks_of_a_node(
    play: Callable[..., SimRun],
) -> None:
    text = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp

def main(gpu, node, total):
    rank = 2 * node + gpu
    dist.init_process_group("nccl", "tcp://localhost:1", rank=rank, world_size=4)
    sum = torch.tensor(rank)
    dist.all_reduce(sum)
    print(gpu, sum.item() == total, flush=True)

if __name__ == "__main__":
    mp.set_start_method("spawn")
    node = int(os.environ["GROUP_RANK"])
    mp.spawn(main, args=(node, 6), nprocs=torch.cuda.device_count())
    context = mp.spawn(print, ("later",), nprocs=2, join=False)
    while not context.join():
        pass
"""
    done = play(text, 4, per_node=2)
    printed = [record.output for record in done.ranks]
    assert printed == [f"{gpu} True\n{gpu} later\n" for gpu in (0, 1, 0, 1)]


def test_a_default_group_may_have_some_of_the_ranks(
    play: Callable[..., SimRun],
) -> None:
    text = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp

def main(rank, size):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    dist.init_process_group("gloo")
    pair = dist.new_group([size - 2, size - 1])
    sums = torch.ones(2)
    dist.all_reduce(sums)
    if rank >= size - 2:
        dist.all_reduce(sums, group=pair)
    store = dist.distributed_c10d._get_default_store()
    print(dist.get_world_size(), sums[0].item(), store.check(["key"]), flush=True)
    dist.barrier()
    store.set("key", "value")
    dist.destroy_process_group()

for size in (4, 3, 2, 4):
    mp.spawn(main, args=(size,), nprocs=size)
"""
    done = play(text, 4)
    assert done.outcome == "finished", done.explanation
    lines = {4: ["4 4.0 False", "4 8.0 False"], 3: ["3 3.0 False", "3 6.0 False"]}
    for rank, record in enumerate(done.ranks):
        told = [lines[4][rank > 1]]
        told += [lines[3][rank > 0]] if rank < 3 else []
        told += ["2 4.0 False"] if rank < 2 else []
        assert record.output.splitlines() == [*told, lines[4][rank > 1]]


def test_os_exit_ends_the_rank_only(play: Callable[..., SimRun]) -> None:
    done = play("import os\nos._exit(3 * int(os.environ['RANK']))", 2)
    assert [record.status for record in done.ranks] == ["finished", "raised"]


def test_memory_is_what_lives(play: Callable[..., SimRun]) -> None:
    ranks: list[Rank] = []
    text = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.zeros(1500))
kept = torch.zeros(1000)
view = kept[10:]
for _ in range(5):
    lost = torch.ones(2000) * 2
    del lost
"""
    assert play(text, 4, on_rank=ranks.append).outcome == "finished"
    for rank in ranks:
        assert rank.tally.peak == 4 * (1000 + 2 * 2000)


@pytest.mark.parametrize("fake", [False, True])
def test_a_reset_peak_is_the_scripts_and_not_the_reports(
    play: Callable[..., SimRun], fake: bool
) -> None:
    ranks: list[Rank] = []
    text = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
kept = torch.zeros(1024)
lost = torch.zeros(2048)
del lost
assert torch.cuda.max_memory_allocated() == 4 * 3072
torch.cuda.reset_peak_memory_stats()
assert torch.cuda.max_memory_allocated() == 4 * 1024
lost = torch.zeros(512)
del lost
assert torch.cuda.memory.max_memory_allocated() == 4 * 1536
assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 4 * 1536
assert torch.accelerator.max_memory_allocated() == 4 * 1536
"""
    done = play(text, 2, on_rank=ranks.append, fake=fake)
    assert done.outcome == "finished", done.ranks[0].output
    assert all(rank.tally.peak == 4 * 3072 for rank in ranks)


ACCELERATE = """
class PartialState:
    _shared_state = {}

    def __init__(self):
        self.__dict__ = self._shared_state
        self.users = getattr(self, "users", 0) + 1
"""
LIGHTNING = """
def rank_zero_only(function):
    return lambda: function() if rank_zero_only.rank == 0 else None

rank_zero_only.rank = None
"""


def test_state_of_known_libraries_is_kept_per_rank(
    play: Callable[..., SimRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site-packages"
    for name, text in (
        ("accelerate/state.py", ACCELERATE),
        ("lightning_utilities/core/rank_zero.py", LIGHTNING),
    ):
        path = installed / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(installed)
    text = """
import os
from accelerate.state import PartialState
from lightning_utilities.core.rank_zero import rank_zero_only
rank_zero_only.rank = int(os.environ["RANK"])
import torch.distributed as dist
dist.init_process_group("gloo")
PartialState()
dist.barrier()
print(PartialState().users, rank_zero_only(lambda: "zero")())
"""
    for _ in range(2):  # the second time the libraries are loaded already
        done = play(text, 3)
        printed = [record.output for record in done.ranks]
        assert printed == ["2 zero\n", "2 None\n", "2 None\n"]
    state = sys.modules.pop("accelerate.state")
    assert state.PartialState._shared_state == {}
    for name in ("accelerate", "lightning_utilities", "lightning_utilities.core"):
        sys.modules.pop(name)
    zero = sys.modules.pop("lightning_utilities.core.rank_zero")
    assert zero.rank_zero_only.rank is None


BATCH_NORM = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

local, rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
dist.init_process_group("nccl")
assert torch.device(local) == torch.device("cuda", local)
assert isinstance(torch.device(local), torch.device)
assert torch.zeros(2, device=local).device == torch.ones(2, device="cuda").device
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
alone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
alone.load_state_dict(net.state_dict())
net = nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda()
net = DistributedDataParallel(net, device_ids=[local])
batch = torch.randn(7, 3, dtype=torch.float64)
part = batch[:2] if rank == 0 else batch[2:4] if rank == 1 else batch[4:]
(net(part.cuda()).square().sum() * 3).backward()
alone(batch).square().sum().backward()
for ours, known in zip(net.module.state_dict().values(), alone.state_dict().values()):
    assert torch.allclose(ours, known, rtol=1e-12), (ours, known)
for ours, known in zip(net.parameters(), alone.parameters()):
    assert torch.allclose(ours.grad, known.grad, rtol=1e-10), (ours.grad, known.grad)
"""

FSDP_1 = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("nccl")
torch.manual_seed(dist.get_rank())
model = FullyShardedDataParallel(torch.nn.Linear(4, 4), sync_module_states=True)
with FullyShardedDataParallel.summon_full_params(model):
    sums = [None] * 2
    dist.all_gather_object(sums, sum(p.sum().item() for p in model.parameters()))
assert sums[0] == sums[1]
"""

BY_HAND = """
import os, torch, torch.distributed as dist

rank, device = int(os.environ["RANK"]), torch.device("cuda", 0)
store = dist.PrefixStore("mine", dist.TCPStore("localhost", 1234, 3, rank == 0))
options = dist.ProcessGroupNCCL.Options()
group = dist.ProcessGroupNCCL(store, 2 - rank, 3, options)
assert (group.rank(), group.size()) == (2 - rank, 3)
numbers = torch.tensor([float(10 ** rank)], device=device)
group.allreduce([numbers]).wait()
assert numbers.item() == 111
parts = [torch.zeros(1) for _ in range(3)]
group.allgather([parts], [torch.tensor([float(rank)])]).wait()
assert [part.item() for part in parts] == [2, 1, 0]
if rank < 2:
    pair = dist.ProcessGroupGloo(dist.PrefixStore("two", store), rank, 2)
    pair.allreduce([numbers]).wait()
    assert numbers.item() == 222
"""


OURS = """
import os, torch
import distlab.distributed as dist

dist.init_process_group()
assert (dist.get_rank(), dist.get_world_size()) == (int(os.environ["RANK"]), 3)
total = torch.tensor([10.0 ** dist.get_rank()])
dist.all_reduce(total)
assert total.item() == 111
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("script", "ranks"), [(BATCH_NORM, 3), (FSDP_1, 2), (BY_HAND, 3), (OURS, 3)]
)
def test_what_only_gpus_do(tmp_path: Path, script: str, ranks: int) -> None:
    path = tmp_path / "script.py"
    path.write_text(script)
    run_script(Script(str(path)), ranks).require_finished()
