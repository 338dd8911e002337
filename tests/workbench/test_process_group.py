"""The reference of `process_group` at work: under faults, and on real processes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

from distlab.cli.hunt import bare
from distlab.grading.checks.process_group import launch, lives
from distlab.grading.checks.process_group import rendezvous as asked
from distlab.grading.checks.process_group.scripts import (
    BY_HAND,
    REFUSED,
    Rank,
    RendezvousContract,
    Script,
    request_of,
)
from distlab.grading.kit.histories import Row
from distlab.grading.report import lines_of
from distlab.grading.verdict import NotYetError
from distlab.runner import Cluster, Limits
from distlab.sim import AlphaBeta, random_script, run
from tests.workbench.golden import Golden
from tests.workbench.judging import (
    ROOT,
    UNITS,
    catalogue,
    solution_of,
    verdict_on_entry,
)
from tests.workbench.meeting_ranks import EXPECTED, NAME, meet_twice, rendezvous

NET = AlphaBeta(alpha_s=1e-3, bytes_per_s=1e9)
NOT_FATAL = ("loss", "duplicate", "freeze", "partition", "straggler", "late")
SOLUTION = UNITS["process_group"].solution(ROOT)


@pytest.mark.parametrize("first", range(0, 120, 30))
def test_ranks_meet_under_faults(first: int) -> None:
    for seed in range(first, first + 30):
        script = random_script(seed, 3, 0.5, services=[NAME], kinds=NOT_FATAL)
        services = {NAME: rendezvous}
        done = run(meet_twice, 3, net=NET, faults=script, services=services)
        assert done.values == [EXPECTED] * 3, script


def test_ranks_meet_on_real_processes(cluster: Cluster) -> None:
    done = cluster.run(
        meet_twice, 3, limits=Limits(seconds=60), services={NAME: rendezvous}
    )
    assert done.require_finished().values == [EXPECTED] * 3


def launched(
    tmp_path: Path, program: str, num_ranks: int = 2, **options: float
) -> subprocess.CompletedProcess[str]:
    """The reference's launcher with real processes of this program."""
    path = tmp_path / "program.py"
    head = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"
    head += "generation = int(os.environ['TORCHELASTIC_RESTART_COUNT']) + 1\n"
    path.write_text(head + textwrap.dedent(program))
    main = f"""
import sys
from distlab.curriculum import load
from distlab.given.process_group import run
unit = load("process_group", "reference")
launcher = unit.Launcher({num_ranks}, **{options!r})
sys.exit(run(launcher, [sys.executable, {str(path)!r}]))
"""
    return subprocess.run(
        [sys.executable, "-c", main],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_killed_rank_is_restarted_with_all_others(tmp_path: Path) -> None:
    done = launched(
        tmp_path,
        """
        os.write(1, f"{rank} {generation}\\n".encode())  # in one piece
        if rank == 1 and generation == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if generation == 1:
            time.sleep(60)
        """,
    )
    assert done.returncode == 0, done.stderr
    printed = {tuple(line.split()) for line in done.stdout.splitlines()}
    # A rank may be stopped before it has printed anything.
    assert {("0", "2"), ("1", "2")} <= printed
    assert printed <= {("0", "2"), ("1", "2"), ("0", "1"), ("1", "1")}


def test_it_gives_up_with_the_code_of_the_first_failure(tmp_path: Path) -> None:
    done = launched(
        tmp_path,
        """
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("ready", flush=True)
            time.sleep(60)
        time.sleep(1)
        sys.exit(7)
        """,
        max_restarts=1,
        grace_s=0.3,
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout.count("ready") == 2


def test_ctrl_c_ends_it_and_its_processes(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    # One write for a line, which print() does not promise.
    program.write_text("import os, time\nos.write(1, b'up\\n')\ntime.sleep(60)\n")
    command = [sys.executable, str(SOLUTION), "2", str(program)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout
        assert launcher.stdout.readline() == b"up\n"
        launcher.send_signal(signal.SIGINT)
        assert launcher.stdout.read() in (b"", b"up\n")  # all its processes have ended
    assert launcher.returncode == 128 + signal.SIGINT


@pytest.mark.slow
def test_torch_meets_again_after_a_restart(tmp_path: Path) -> None:
    done = launched(
        tmp_path,
        """
        import torch
        import torch.distributed as dist
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo")
        if rank == 1 and generation == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        total = torch.tensor([float(rank + 1)])
        dist.all_reduce(total)
        os.write(1, f"sum {total.item()}\\n".encode())
        dist.destroy_process_group()
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["sum 3.0", "sum 3.0", ""]


def test_verdicts_say_what_happened(
    cluster: Cluster, tmp_path: Path, golden: Golden
) -> None:
    told = []
    for name in ("PG29", "PG36", "PG59", "PG67"):
        verdict = verdict_on_entry(cluster, tmp_path, name)
        assert verdict.status == "fail"
        told.append(verdict.message)
    golden("units/process-group-verdicts", "\n".join(told))


@pytest.mark.parametrize(
    ("name", "size"), [("PG29", 3), ("PS01", None), ("PS07", 3), ("PS41", 3)]
)
def test_a_verdict_has_the_number_of_ranks_that_were_played(
    cluster: Cluster, tmp_path: Path, name: str, size: int | None
) -> None:
    verdict = verdict_on_entry(cluster, tmp_path, name)
    failure = verdict.first_failure()
    assert failure
    assert failure.world_size == size
    last = lines_of(verdict)[-1][1]
    assert ("n = " in last) == bool(size and not verdict.is_plan)
    said = bare(verdict).first_failure()
    assert said
    assert (f" {size} ranks" in said.message) == bool(size)


def _wrong_unit(name: str) -> ModuleType:
    """The unit with the change of an entry of the catalogue."""
    entry = catalogue()[name]
    module = ModuleType(name)
    sys.modules[name] = module
    exec(entry.applied_to(solution_of("process_group")), vars(module))
    return module


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("PG52", ("0",)),  # a rank that ended with 0 is started again
        ("PG54", ("1",)),  # SIGTERM to a rank that has ended
        ("PG56", ("WakeAt",)),
        ("PG57", ("SIGTERM",)),  # SIGKILL at once
        ("PG63", ("0", "50", "1")),  # restarts count forever
        ("PG65", ("2",)),  # the next generation has the same number
        ("PG68", ("SIGKILL", "128", "9")),
        ("PG70", ("interruption",)),
    ],
)
def test_an_unknown_mistake_of_a_launcher_is_met_with_facts(
    name: str, named: tuple[str, ...]
) -> None:
    unit, found = _wrong_unit(name), dict[str, NotYetError]()
    for script in lives.BY_HAND:
        found |= launch.faults(script, launch.play_launcher(unit, script))
        if found:
            break
    (fault,) = found.values()
    assert not fault.slug
    assert all(re.search(rf"\b{word}\b", fault.rule) for word in named), fault.rule


def test_each_reply_that_is_not_due_is_met_with_facts() -> None:
    """Whatever is replied instead: a rule, at each message of each script."""
    wrong_replies = (None, 7, "7", REFUSED)
    for script in BY_HAND:
        for place, text in enumerate(script[1]):
            rows = _right_rows(script, place)
            for reply in wrong_replies:
                row = Row(0.0, -2 - place, request_of(text), reply)
                found = asked.faults(script, [*rows, row])
                assert all(fault.rule for fault in found.values()), (script, reply)


def _right_rows(script: Script, upto: int) -> list[Row]:
    """The messages before one, and the replies of a right rendezvous."""
    contract, rows = RendezvousContract(script[0]), list[Row]()
    for place, text in enumerate(script[1][:upto]):
        row = Row(0.0, -2 - place, request_of(text), None)
        due = contract.offer(row)
        reply = min(due.free) if isinstance(due, Rank) else due
        if isinstance(due, Rank):
            contract.offer(row._replace(reply=reply))
        rows.append(row._replace(reply=reply))
    return rows
