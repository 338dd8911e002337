"""What programs do to their surroundings, and who outlives whom: nothing is left.

The clocks here only keep a hang from hanging the suite; nothing measures speed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distlab.processes import tree
from distlab.runner import Cluster, Limits, RunnerError
from tests.workbench.conformance import misbehaviour as programs
from tests.workbench.conformance import parent as parent_script
from tests.workbench.golden import Golden

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0


def eventually(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_a_process_may_go_while_its_threads_are_looked_at() -> None:
    for _ in range(100):
        program = subprocess.Popen(["true"])
        ended = threading.Thread(target=program.wait)
        ended.start()
        while ended.is_alive():
            tree.sleeps(program.pid)
        assert tree.sleeps(program.pid)  # gone: unknown


# ── what a program does to its surroundings ─────────────────────────────────────────


def test_daemonised_grandchildren_are_ended(cluster: Cluster) -> None:
    run = cluster.run(programs.daemonises, 2).require_finished()
    assert all(pid > 1 for pid in run.values)
    cluster.settle()
    assert not [pid for pid in run.values if Path(f"/proc/{pid}").exists()]


def test_a_flood_of_output_is_cut_and_does_not_stop_the_run(cluster: Cluster) -> None:
    cap = 10_001  # odd, so that it falls into the middle of an "ä"
    run = cluster.run(programs.floods, 2, 5_000, limits=Limits(output_bytes=cap))
    assert run.values == ["done", "done"]
    for record in run.ranks:
        assert cap - 2 < len(record.output.encode()) <= cap
        assert set(record.output) == {"ä", "\n"}


def test_output_is_read_in_pieces_and_stays_whole(cluster: Cluster) -> None:
    """A piece may end in the middle of an "ä"; lines of 2,001 bytes see to that."""
    run = cluster.run(programs.floods, 1, 150, limits=Limits(output_bytes=1 << 20))
    assert run.ranks[0].output == ("ä" * 1000 + "\n") * 150


def test_an_endless_flood_meets_the_limit(cluster: Cluster) -> None:
    limits = Limits(seconds=0.5, output_bytes=1000)
    run = cluster.run(programs.floods_for_ever, 2, limits=limits)
    assert (run.outcome, [record.status for record in run.ranks]) == (
        "timeout",
        ["running", "running"],
    )
    assert [len(record.output) for record in run.ranks] == [1000, 1000]


def test_a_journal_has_a_cap(cluster: Cluster) -> None:
    run = cluster.run(programs.babbles_in_calls, 2, limits=Limits(journal_events=50))
    assert run.require_finished().values == [0, 1]
    assert [len(record.journal) for record in run.ranks] == [50, 50]


def test_without_a_journal_nothing_is_noted(cluster: Cluster) -> None:
    run = cluster.run(programs.is_alone, 2, journal=False).require_finished()
    assert [record.journal for record in run.ranks] == [[], []]
    assert run.values == [9900.0, 9900.0]


def test_a_closed_stdout_is_the_programs_own_affair(cluster: Cluster) -> None:
    run = cluster.run(programs.closes_stdout, 2)
    assert run.require_finished().values == ["still here"] * 2
    assert [record.output for record in run.ranks] == ["before\n"] * 2


def test_threads_may_all_report_at_once(cluster: Cluster) -> None:
    told: list[int] = []
    run = cluster.run(
        programs.chatty_threads, 2, on_report=lambda r, v: told.append(len(v[1]))
    )
    assert run.require_finished().values == [100_000] * 2
    assert told == [100_000] * 40


def test_garbage_on_our_line_is_no_record(cluster: Cluster) -> None:
    run = cluster.run(programs.writes_on_our_line, 1)
    assert run.require_finished().values == ["unheard"]


# ── the parent and the zygote ───────────────────────────────────────────────────────


@pytest.fixture
def own_cluster() -> Iterator[Cluster]:
    with Cluster() as one:
        yield one


def test_a_killed_zygote_is_replaced(own_cluster: Cluster, golden: Golden) -> None:
    def kill(rank: int, value: object) -> None:
        assert own_cluster._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(own_cluster._process.pid, signal.SIGKILL)

    with pytest.raises(RunnerError) as died:
        own_cluster.run(programs.sleeps_long, 2, on_report=kill)
    golden("runner/zygote died", str(died.value))
    assert own_cluster.run(programs.hello, 2).values == [[0, 2], [1, 2]]
    assert own_cluster._process is not None
    own_cluster._process.kill()  # between two runs
    own_cluster._process.wait()
    assert own_cluster.run(programs.hello, 2).outcome == "finished"


@pytest.mark.slow
def test_close_ends_the_zygote_and_may_come_twice() -> None:
    cluster = Cluster()
    cluster.close()  # before anything was started
    cluster.start()
    assert cluster._process is not None
    process = cluster._process
    cluster.close()
    cluster.close()
    assert process.poll() is not None
    with cluster:
        assert cluster.run(programs.hello, 1).outcome == "finished"


@pytest.mark.slow
def test_modules_can_be_imported_beforehand(own_cluster: Cluster) -> None:
    own_cluster.warm("colorsys")  # before the start
    own_cluster.start(wait=False)
    own_cluster.warm("tests.workbench.conformance.misbehaviour", "colorsys")
    assert own_cluster.run(programs.hello, 1).outcome == "finished"
    with pytest.raises(RunnerError, match="'no_such_module'"):
        own_cluster.warm("no_such_module")
    assert own_cluster.run(programs.hello, 1).outcome == "finished"


def test_a_zygote_that_cannot_start_says_why() -> None:
    with (
        Cluster(preload=("no_such_module",)) as cluster,
        pytest.raises(RunnerError, match="'no_such_module'"),
    ):
        cluster.run(programs.hello, 1)


def test_runs_leave_no_descriptors_behind(cluster: Cluster) -> None:
    cluster.run(programs.hello, 2)
    before = len(os.listdir("/proc/self/fd"))
    for program in (programs.hello, programs.one_raises, programs.ring_of_sends):
        cluster.run(program, 2)
    assert len(os.listdir("/proc/self/fd")) == before


# A parent of its own: the processes below it are found by a token in their environment.


def _with_token(token: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if token.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


class Parent:
    """The script `conformance/parent.py` in a process of its own."""

    def __init__(self, what: str, folder: Path) -> None:
        self.token = f"distlab-test-{uuid.uuid4().hex}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", parent_script.__name__, what, str(folder)],
            cwd=ROOT,
            env={**os.environ, "DISTLAB_TEST_TOKEN": self.token},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        for pid in _with_token(self.token):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[[str], Parent]]:
    parents: list[Parent] = []

    def start(what: str) -> Parent:
        parents.append(Parent(what, tmp_path))
        return parents[-1]

    yield start
    for parent in parents:
        parent.end()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_parent_that_ends_takes_everything_with_it(
    launch: Callable[[str], Parent], tmp_path: Path, how: signal.Signals
) -> None:
    parent = launch("one")
    assert [parent.line(), parent.line()] == ["ready", "ready"]
    assert len(_with_token(parent.token)) == 4  # itself, the zygote, two ranks
    parent.process.send_signal(how)
    if how == signal.SIGINT:  # it is told, and can go on with new ranks
        assert [parent.line(), parent.line()] == ["interrupted", "finished"]
    status = parent.process.wait(timeout=PATIENCE_S)
    assert status == (0 if how == signal.SIGINT else -how)
    assert eventually(lambda: not _with_token(parent.token))
    assert eventually(lambda: not list(tmp_path.iterdir())), list(tmp_path.iterdir())


def test_a_parent_killed_between_two_runs_leaves_no_folder(
    launch: Callable[[str], Parent], tmp_path: Path
) -> None:
    parent = launch("idle")
    assert parent.line() == "finished"
    assert list(tmp_path.iterdir())  # it is kept for who wants to look
    parent.process.kill()
    assert eventually(lambda: not list(tmp_path.iterdir())), list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_clusters_at_once_do_not_meet(launch: Callable[[str], Parent]) -> None:
    parents = [launch("together") for _ in range(2)]
    for parent in parents:
        for _ in range(3):
            assert parent.line() == "finished [14850.0, 14850.0, 14850.0]"
        assert parent.process.wait(timeout=PATIENCE_S) == 0
