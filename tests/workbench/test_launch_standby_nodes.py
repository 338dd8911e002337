"""`--standby` and `--elastic` on several nodes: on loopback, or in namespaces."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import pytest

from distlab.chaos import partition
from distlab.chaos.faults import FIRED
from distlab.launch import LaunchConfig
from distlab.launch.agent import TIMES
from distlab.launch.elastic_decisions import RANKS
from distlab.launch.forked import Heard
from distlab.launch.host import Host, Look, Looked, as_event, as_words
from distlab.launch.hosts import Hosts, best_shift
from distlab.launch.nodes import NodeCame, NodeLost, Said
from distlab.launch.report import Gone
from distlab.launch.stage import OtherNodes
from distlab.launch.stores import Store
from tests.corpora import recovery_jobs as jobs
from tests.workbench.course import ROOT
from tests.workbench.launching import (
    Agent,
    ended,
    free_port,
    is_alive,
    linux,
    log,
    wait_for,
)
from tests.workbench.test_launch_standby import samples

NUM_STEPS = 300

# ── which node gets what ────────────────────────────────────────────────────────────


class Written:
    """Orders, written down: the host of node 0, the stage and the store in one."""

    port, sockets, members = 7, (), (0, 1)

    def __init__(self) -> None:
        self.orders: list[tuple[int, object]] = []
        self.given_up: list[int] = []

    def obey(self, order: str, arguments: tuple[object, ...]) -> None:
        self.orders.append((0, {"order": order, "arguments": arguments}))

    def order(self, node: int, words: object) -> None:
        self.orders.append((node, words))

    def begin(self, *port: int) -> None: ...
    def waiting(self) -> str:
        return ""

    def meet(self, generation: int) -> bool:
        return generation == 1

    def welcome(self, node: int) -> None: ...
    def dismiss(self, node: int) -> None:
        self.given_up.append(node)


@pytest.fixture
def hosts() -> tuple[Hosts, Written]:
    """Two nodes of two ranks each, with four processes and a standby."""
    written = Written()
    config = LaunchConfig(nnodes=2, node_rank=0, nproc_per_node=2, standby=1)
    parts: tuple[Host, Store, OtherNodes] = (written, written, written)  # type: ignore[assignment]
    every = Hosts(config, *parts, say=lambda text: None)
    assert every.begin()
    assert written.orders == [(1, {"begin": 7})]
    written.orders.clear()
    for number in range(5):
        every.start(number)
    return every, written


def test_nodes_are_filled_one_after_the_other_and_standbys_go_where_few_are(
    hosts: tuple[Hosts, Written],
) -> None:
    every, written = hosts
    assert [node for node, _ in written.orders] == [0, 0, 1, 1, 0]
    assert every.spares == {4}
    gone = Gone(number=3, code=-9, node="node 1")
    assert every.heard(Said(1, as_words(gone))) == gone
    every.start(5)
    assert every.spares == {4}
    assert written.orders[-1] == (1, {"order": "start", "arguments": (5,)})
    places = every.places({0: 0, 1: 1, 2: 2, 3: 4})
    of_rank = [[*places[rank].values()] for rank in range(4)]
    assert of_rank == [[0, 3, 1], [1, 3, 1], [0, 1, 1], [2, 3, 1]]


@pytest.mark.parametrize(
    ("nodes", "shift"),
    [
        ([0], 1),
        ([0, 0, 0], 1),
        ([0, 1], 1),
        ([0, 0, 1, 1], 2),
        ([0, 1, 0, 1], 1),
        ([0, 0, 1, 1, 2, 2], 2),
        ([0, 0, 0, 1], 1),
    ],
)
def test_copies_go_to_another_node(nodes: list[int], shift: int) -> None:
    assert best_shift(nodes) == shift


def test_a_node_takes_its_processes_along_and_may_come_back(
    hosts: tuple[Hosts, Written],
) -> None:
    every, written = hosts
    assert every.room == 4
    assert [one.number for one in every.lost(NodeLost(1))] == [2, 3]
    assert (every.room, written.given_up) == (2, [1])
    assert every.lost(NodeLost(1)) == []
    assert every.heard(Said(1, as_words(Heard(2, {"ready": True})))) is None
    written.orders.clear()
    every.signal(3, 9)
    assert written.orders == []
    every.start(5)
    assert written.orders[-1][0] == 0
    assert every.came(NodeCame(1))
    assert not every.came(NodeCame(1))
    assert every.room == 4
    every.start(6)
    assert [node for node, _ in written.orders[1:]] == [1, 1]


def test_times_are_told_as_ages(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"s": 100.0}
    monkeypatch.setattr("distlab.launch.host.time.monotonic", lambda: clock["s"])
    looked = Looked({3: Look(7, 99.0, "wait", 98.0, 99.5)})
    times = {"generation": 2, "lost_s": 97.0}
    heard = Heard(3, {"times": times, "step": 7})
    sent = as_words(looked), as_words(heard)
    clock["s"] = 10.0  # on the other node
    assert as_event({"looked": {"3": [*sent[0]["looked"][3]]}}) == Looked(
        {3: Look(7, 9.0, "wait", 8.0, 9.5)}
    )
    times = {"generation": 2, "lost_s": 7.0}
    assert as_event(sent[1]) == Heard(3, {"times": times, "step": 7})


# ── two agents on one machine ───────────────────────────────────────────────────────

Start = Callable[..., Agent]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the agent of a node with these flags, script and arguments."""
    started: list[Agent] = []
    port = free_port()

    def agent(node: int, *rest: object) -> Agent:
        command = [sys.executable, "-m", "distlab.launch", "--nnodes", "2"]
        command += ["--node-rank", str(node), "--master-port", str(port)]
        command += ["--log-dir", str(tmp_path / f"node_{node}"), *map(str, rest)]
        with (tmp_path / "said.txt").open("ab") as said:
            started.append(
                subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said, text=True)
            )
        return started[-1]

    yield agent
    for process in started:
        process.kill()
        process.wait()


@linux
@pytest.mark.slow
def test_a_rank_and_then_a_whole_node_are_replaced_without_losing_a_bit(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "WORLD_SIZE", 4)
    with jobs.plain(NUM_STEPS) as plain:
        expected = plain.finish()
    (tmp_path / "stamps").mkdir()
    (tmp_path / "slow").write_text("0.04")
    flags = ("--nproc-per-node", 2, "--standby", 2, "--max-restarts", 4)
    arguments = (*flags, jobs.SCRIPT, NUM_STEPS, tmp_path)
    both = [start(node, *arguments) for node in (0, 1)]
    job = jobs.Job(tmp_path, both[0])  # type: ignore[arg-type]
    kill = job.kill(3, needs_standby=True)
    assert kill.lost_steps == 0
    wait_for(tmp_path / "node_0" / TIMES)

    job.wait_for_steps(5)
    pids = {int(path.suffix[1:]) for path in tmp_path.glob("ready.*")}
    before = max(rows[-1][0] for by in job.stamps().values() for rows in by.values())
    both[1].kill()
    job.wait_until(
        lambda: all(
            max(rows[-1][0] for rows in by.values()) > before + 5
            for by in job.stamps().values()
        ),
        "steps without node 1",
    )
    of_node_0 = {pid for pid in pids if is_alive(pid)}
    assert len(of_node_0) < len(pids)
    assert job.finish() == expected
    said = (tmp_path / "said.txt").read_text()
    assert "node 1 is gone" in said
    steps = [s for by in job.stamps().values() for rows in by.values() for s, _ in rows]
    assert max(steps) == NUM_STEPS


def wait_for_size(folder: Path, size: int, process: Agent) -> None:
    """Until the newest steps are done by so many ranks."""
    until = time.monotonic() + 240
    while max(samples(folder), default=(0, 0))[1] != size:
        assert process.poll() is None, (folder / "said.txt").read_text()
        assert time.monotonic() < until
        time.sleep(0.05)


@linux
@pytest.mark.slow
def test_ranks_and_a_node_leave_an_elastic_job_and_come_back(
    tmp_path: Path, start: Start
) -> None:
    program = ROOT / "tests" / "workbench" / "elastic_training.py"
    flags = ("--elastic", "1:4", "--join-grace", 3)
    arguments = (*flags, program, tmp_path, 1000)
    both = [start(node, *arguments) for node in (0, 1)]
    wait_for_size(tmp_path, 4, both[0])
    pids = [int(path.suffix[1:]) for path in tmp_path.glob("ids.*")]
    (_, victim) = [pid for pid in pids if "node_1" in os.readlink(f"/proc/{pid}/fd/1")]
    os.kill(victim, signal.SIGKILL)
    wait_for_size(tmp_path, 3, both[0])
    ranks = tmp_path / "node_0" / RANKS
    ranks.write_text("3")
    while "3 ranks are wanted" not in (tmp_path / "said.txt").read_text():
        time.sleep(0.05)
    ranks.write_text("4")
    wait_for_size(tmp_path, 4, both[0])
    both[1].kill()
    wait_for_size(tmp_path, 2, both[0])
    again = start(1, *arguments)
    wait_for_size(tmp_path, 4, both[0])
    (tmp_path / "fast").touch()
    assert both[0].wait(240) == 0
    assert again.wait(60) == 0
    rows = list(samples(tmp_path))
    size_of = {step: size for step, size, *_ in rows}
    assert sorted(size_of) == list(range(1000))
    order = [size for size, _ in groupby(size_of[step] for step in sorted(size_of))]
    assert order[order.index(4) :] in ([4, 3, 4, 2, 4], [4, 3, 4, 2, 3, 4])
    assert ended(victim)
    seen = [i for *_, ids in rows for i in ids]
    assert len(seen) == len(set(seen))


WAITS = """
import torch
import distlab.distributed as dist
dist.init_process_group()
model = dist.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
here = pathlib.Path(__file__).parent
(here / f"pid.{os.getpid()}").touch()
for step in dist.elastic({"model": model, "optimizer": optimizer}).steps(STEPS):
    with step:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.02)
        if step.index >= 3 and not (here / f"up.{dist.get_rank()}").exists():
            print("trains", dist.get_world_size(), os.environ["LOCAL_RANK"], flush=True)
            (here / f"up.{dist.get_rank()}").touch()
        DURING
"""


def waits(folder: Path, during: str = "pass", num_steps: int = 100_000) -> Path:
    path = folder / "program.py"
    program = WAITS.replace("DURING", during).replace("STEPS", str(num_steps))
    path.write_text(f"import os, pathlib, time\n{program}")
    return path


@linux
@pytest.mark.slow
def test_without_node_0_all_processes_end(tmp_path: Path, start: Start) -> None:
    flags = ("--nproc-per-node", 2, "--standby", 1, "--grace-period", 2)
    both = [start(node, *flags, waits(tmp_path)) for node in (0, 1)]
    for rank in range(4):
        wait_for(tmp_path / f"up.{rank}")
    both[0].kill()
    assert both[1].wait(60) == 1
    said = (tmp_path / "said.txt").read_text()
    assert re.search(r"(?m)^\[distlab\] node 0 at 127\.0\.0\.1:\d+\b.*\b1$", said)
    pids = [int(path.suffix[1:]) for path in tmp_path.glob("pid.*")]
    assert len(pids) >= 4
    assert all(ended(pid) for pid in pids)


@linux
@pytest.mark.slow
def test_a_signal_to_another_node_ends_the_job(tmp_path: Path, start: Start) -> None:
    flags = ("--elastic", "2:4", "--grace-period", 2)
    both = [start(node, *flags, waits(tmp_path)) for node in (0, 1)]
    for rank in range(4):
        wait_for(tmp_path / f"up.{rank}")
    both[1].send_signal(signal.SIGTERM)
    assert [agent.wait(60) for agent in both] == [143, 143]
    said = (tmp_path / "said.txt").read_text()
    assert len(re.findall(r"\bSIGTERM\b.*\b143\b", said)) == 2


@linux
@pytest.mark.slow
def test_with_the_link_cut_for_good_an_elastic_job_continues(tmp_path: Path) -> None:
    if why_not := partition.why_not():
        pytest.skip(why_not)
    during = f"""
        fired = here / {FIRED!r}
        if dist.get_world_size() == 4 and dist.get_rank() == 0:
            fired.touch()
        if not fired.exists():  # some ranks are not there yet
            time.sleep(0.5)
        elif dist.get_world_size() == 2:
            print("alone", flush=True)
    """
    launch = [sys.executable, "-m", "distlab.launch"]
    flags = ["--elastic", "2:4", "--node-timeout", "4", "--grace-period", "2"]
    flags += ["--log-dir", str(tmp_path)]
    command = [*launch, *flags, str(waits(tmp_path, during, 400))]
    done = subprocess.run(
        partition.inside(1e6, tmp_path, command),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "node 1 is gone" in done.stderr
    assert "node 0 at 10.78.0.1:29500 " in done.stderr
    assert done.returncode == 0  # that of node 0, whose ranks went on by themselves
    assert log(tmp_path, 0)[-1] == "alone"
