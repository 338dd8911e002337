"""`distlab.launch` on one node: ranks, logs, restarts, signals, and what it refuses."""

from __future__ import annotations

import dataclasses
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distlab.curriculum.choose import chosen_unit
from distlab.launch import (
    DistributedLauncher,
    LaunchConfig,
    LaunchError,
    decisions,
    launch_distributed_training,
)
from distlab.launch.decisions import DecisionError
from distlab.launch.inbox import Inbox
from distlab.launch.interfaces import interface_to
from distlab.launch.report import (
    Failure,
    apart,
    gave_up,
    going_on,
    interrupted,
    recovered,
    restarting,
)
from distlab.monitor.jsonl import read_folder
from tests.workbench.course import ROOT
from tests.workbench.golden import Golden
from tests.workbench.launching import (
    DIES,
    LAST_WORDS,
    START,
    ended,
    is_alive,
    linux,
    script,
)

Launched = Callable[..., int]


@pytest.fixture
def launched(tmp_path: Path) -> Launched:
    """Launches a program with this process as the agent; returns the exit code."""

    def launch(program: str, *arguments: object, **config: Any) -> int:
        path = script(tmp_path, program)
        given = {"nproc_per_node": 2, "log_dir": tmp_path, **config}
        return DistributedLauncher(LaunchConfig(**given)).launch(path, *arguments)

    return launch


MONITORED = """
import subprocess
import urllib.request
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
data = TensorDataset(torch.randn(48, 4))
sampler = DistributedSampler(data, 2, rank)
nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])  # has no shape
list(DataLoader([0], collate_fn=lambda _: nested))
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (inputs,) in DataLoader(data, batch_size=2, sampler=sampler):
        model(inputs).mean().backward()
        optimizer.step()
    (here / f"{generation}.{epoch}.{rank}").touch()
    wait_for(f"{generation}.{epoch}.{1 - rank}")
    if generation == 1 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    child = "import torch; torch.optim.SGD([torch.ones(1)]).step()"
    subprocess.run([sys.executable, "-c", child], check=True)
    until, page = time.monotonic() + 20, ""
    while 'rank="1"} 3' not in page and time.monotonic() < until:
        page = urllib.request.urlopen(sys.argv[1]).read().decode()
        time.sleep(0.05)
    (here / "page").write_text(page)
"""


@pytest.mark.slow
def test_the_steps_of_a_plain_script_are_monitored(
    launched: Launched, tmp_path: Path
) -> None:
    """One rank is killed in between, one has a child: figures and counters go on."""
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code = launched(
        MONITORED,
        f"http://127.0.0.1:{port}/metrics",
        max_restarts=1,
        monitor=tmp_path / "one",
        also=(f"prometheus:{port}",),
    )
    assert code == 0
    page = (tmp_path / "page").read_text()
    values = dict(re.findall(r"^(distlab_\w+)\{job=\"one\"\} (\S+)$", page, re.M))
    assert float(values["distlab_world_size"]) == 2
    assert float(values["distlab_restarts_total"]) == 1
    assert float(values["distlab_steps_total"]) >= 20
    assert float(values["distlab_epoch"]) >= 1
    recorded = read_folder(tmp_path / "one")
    assert (recorded.run["job"], recorded.run["world_size"]) == ("one", 2)
    last = [rows[-1] for rows in recorded.records.values()]
    assert [(row.epoch, row.learning_rate) for row in last] == [(2, 0.5)] * 2
    assert last[0].step == last[1].step >= 34  # 10 before, 24 after the restart
    assert sum(row.samples for row in recorded.records[1]) == 2 * (10 + 24)
    assert min(row.num_steps for row in recorded.records[0]) > 1  # not the child's one
    assert {row.get("restarts") for row in recorded.figures} == {None, 1.0}
    with pytest.raises(LaunchError, match="one "):
        launched("", monitor=tmp_path / "one")


# ── ranks, logs, lines ──────────────────────────────────────────────────────────────


def test_each_rank_has_its_environment_its_log_and_its_lines(
    launched: Launched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    print(*(os.environ[name] for name in names), sys.argv[1:])
    print(os.environ["TORCHELASTIC_USE_AGENT_STORE"], os.environ["DISTLAB_BACKEND"])
    print("to stderr", file=sys.stderr)
    """
    assert launched(program, "--epochs", 3, backend="tcp") == 0
    for rank in (0, 1):
        lines = (tmp_path / f"rank_{rank}.log").read_text().splitlines()
        assert lines == [
            f"{rank} {rank} 2 2 127.0.0.1 ['--epochs', '3']",
            "True tcp",
            "to stderr",
        ]
    shown = capsys.readouterr()
    assert shown.err == apart(2)  # nobody has used the store
    for rank in (0, 1):
        tagged = (line for line in shown.out.splitlines() if f"[rank {rank}]" in line)
        log = (tmp_path / f"rank_{rank}.log").read_text().splitlines()
        assert [line.removeprefix(f"[rank {rank}] ") for line in tagged] == log


def test_a_function_call_launches_too(tmp_path: Path) -> None:
    path = script(tmp_path, "sys.exit(int(sys.argv[1]) if rank == 1 else 0)")
    config = {"nproc_per_node": 3, "log_dir": tmp_path}
    assert launch_distributed_training(path, 5, **config) == 5
    with pytest.raises(LaunchError, match="'num_ranks'"):
        launch_distributed_training(path, num_ranks=2)


def test_what_has_no_end_of_line_is_shown_and_progress_bars_by_their_last_state(
    launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "print('10 %\\r20 %\\r', end=''); print('done', end='')"
    assert launched(program, nproc_per_node=1) == 0
    assert capsys.readouterr().out == "[rank 0] done\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says so")
def test_gloo_is_told_the_interface(
    launched: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert interface_to("127.0.0.1") == "lo"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    program = "print(os.environ['GLOO_SOCKET_IFNAME'], os.environ['OMP_NUM_THREADS'])"
    assert launched(program) == 0
    assert (tmp_path / "rank_1.log").read_text() == "lo 1\n"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert launched(program) == 0
    assert (tmp_path / "rank_1.log").read_text() == "eth7 5\n"


# ── failures and restarts ───────────────────────────────────────────────────────────

KILLED = Failure(rank=2, code=-signal.SIGKILL, generation=1, lines=[], log="rank_2.log")


def test_what_the_launcher_says(golden: Golden) -> None:
    failed = dataclasses.replace(
        KILLED, code=7, lines=["start", LAST_WORDS], node="node 1 (host)"
    )
    without_rank = dataclasses.replace(failed, rank=-1, node="")
    lost = dataclasses.replace(KILLED, is_lost=True)
    texts = (
        *(restarting(what, 3, 2) for what in (None, KILLED, failed, lost)),
        *(gave_up(what, 1, 3) for what in (None, KILLED, failed, without_rank)),
        recovered(KILLED, 4, 17, 0.25),
        *(going_on(2, 3, 4), apart(4), interrupted(signal.SIGTERM, 143)),
    )
    golden("launch/said", "\n".join(texts))


def test_a_killed_rank_is_restarted_with_all_others(
    launched: Launched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launched(DIES, 1, nproc_per_node=4, max_restarts=1) == 0
    for rank in range(4):
        lines = (tmp_path / f"rank_{rank}.log").read_text().splitlines()
        assert lines[0] == "start 1"
        assert lines[-2:] == [START.format(2), "start 2"]
    said = capsys.readouterr().err
    assert said == restarting(KILLED, 1, 2) + apart(4)


def test_past_the_budget_it_says_which_rank_by_which_signal_and_its_last_lines(
    launched: Launched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launched(DIES, 9, nproc_per_node=4, max_restarts=1) == 128 + signal.SIGKILL
    log = str(tmp_path / "rank_2.log")
    last = dataclasses.replace(KILLED, lines=["start 2", LAST_WORDS], log=log)
    said = capsys.readouterr().err
    assert said == restarting(KILLED, 1, 2) + gave_up(last, 137, 2)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_max_restarts(launched: Launched, tmp_path: Path, most: int) -> None:
    program = "print('up'); sys.exit(7 if rank == 1 else 0)"
    assert launched(program, max_restarts=most) == 7
    assert (tmp_path / "rank_1.log").read_text().count("up") == 1 + most


@pytest.mark.parametrize("interval_s", [0.03, 0.2])
def test_monitor_interval(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, interval_s: float
) -> None:
    waits: list[float] = []
    wait = Inbox.wait

    def noting(inbox: Inbox, seconds: float) -> None:
        waits.append(seconds)
        wait(inbox, seconds)

    monkeypatch.setattr(Inbox, "wait", noting)
    assert launched("time.sleep(0.3)", monitor_interval=interval_s) == 0
    assert set(waits) == {interval_s}


def test_grace_period(launched: Launched, tmp_path: Path) -> None:
    program = """
    signal.signal(signal.SIGTERM, lambda *_: print("told", flush=True))
    say_pid()
    if rank == 1:
        wait_for("0.pid")
        sys.exit(3)
    while True:
        time.sleep(600)
    """
    assert launched(program, grace_period=0.2) == 3
    assert (tmp_path / "rank_0.log").read_text() == "told\n"
    assert not is_alive(int((tmp_path / "0.pid").read_text()))


def test_a_rank_that_is_stopped_is_continued_to_hear_of_the_end(
    launched: Launched, tmp_path: Path
) -> None:
    program = """
    if rank == 0:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("told"))
        say_pid()
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
    wait_for("0.pid")
    pid = (here / "0.pid").read_text()
    while " T " not in pathlib.Path(f"/proc/{pid}/stat").read_text():
        time.sleep(0.01)
    sys.exit(3)
    """
    assert launched(program, grace_period=60) == 3
    assert (tmp_path / "rank_0.log").read_text() == "told\n"


# ── nothing left ────────────────────────────────────────────────────────────────────


@linux
def test_what_a_rank_leaves_behind_is_ended(launched: Launched, tmp_path: Path) -> None:
    program = """
    child = subprocess.Popen(["sleep", "600"])
    (here / f"{rank}.child").write_text(str(child.pid))
    """
    assert launched(program) == 0
    for rank in (0, 1):
        assert ended(int((tmp_path / f"{rank}.child").read_text()))


SLEEPS = "say_pid()\ntime.sleep(600)\n"


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a command-line agent of two ranks and waits until both are up."""
    started: list[subprocess.Popen[str]] = []

    def start(program: str = SLEEPS, *flags: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "distlab.launch", "--nproc-per-node", "2"]
        command += ["--log-dir", str(tmp_path), *flags]
        command.append(str(script(tmp_path, program)))
        process = subprocess.Popen(
            command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        until = time.monotonic() + 120
        while not all((tmp_path / f"{rank}.pid").exists() for rank in (0, 1)):
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.02)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_is_the_exit_code(
    agent: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: int
) -> None:
    process = agent()
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert said == interrupted(number, 128 + number)
    for rank in (0, 1):
        assert ended(int((tmp_path / f"{rank}.pid").read_text()))


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_the_grace_period(
    agent: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    program = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPS
    process = agent(program, "--grace-period", "3600")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode == 130


@linux
@pytest.mark.slow
def test_ranks_end_with_a_killed_agent(
    agent: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = agent()
    process.kill()
    process.wait()
    for rank in (0, 1):
        assert ended(int((tmp_path / f"{rank}.pid").read_text()))


# ── what it refuses, in one sentence ────────────────────────────────────────────────


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    launcher = DistributedLauncher(LaunchConfig(log_dir=tmp_path))
    with pytest.raises(LaunchError, match=r"/none\.py\b"):
        launcher.launch(tmp_path / "none.py")
    with pytest.raises(LaunchError, match=re.escape(str(tmp_path))):
        launcher.launch(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use(launched: Launched) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"\b{port} of 127\.0\.0\.1\b"):
            launched("", master_port=port)
    assert launched("", master_port=port) == 0


def test_an_address_of_another_node(launched: Launched) -> None:
    with pytest.raises(LaunchError, match=r"\b192\.0\.2\.1\b"):
        launched("", master_addr="192.0.2.1")  # reserved for documentation


def test_logs_that_cannot_be_written(launched: Launched, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="--log-dir"):
        launched("", log_dir=tmp_path / "file")


def test_more_gpus_than_there_are(launched: Launched) -> None:
    with pytest.raises(LaunchError, match=r"\bnccl\b.*\b99\b"):
        launched("", backend="nccl", nproc_per_node=99)


# ── the code that decides ───────────────────────────────────────────────────────────


def mine(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Have the launcher decide by a changed reference, as the learner's own."""

    def choose(*given: Any) -> Any:
        choice = chosen_unit(*given)
        source = choice.reference
        assert old in source.text
        text = source.text.replace(old, new)
        parts = tuple(dataclasses.replace(p, whose="mine") for p in choice.parts)
        changed = dataclasses.replace(source, side="mine", text=text)
        return dataclasses.replace(choice, source=changed, grafts=(), parts=parts)

    monkeypatch.setattr(decisions, "chosen_unit", choose)


BEGIN = "return self.start_all()\n            case Ended"


def test_the_learners_launcher_decides(
    launched: Launched,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    old, new = "return [Finish(self.exit_code)]", "return [Finish(77)]"
    mine(monkeypatch, old, new)
    assert launched("") == 77
    said = capsys.readouterr().err
    assert re.match(r"\[distlab\] .*\bprocess_group\.launch\n", said)


@pytest.mark.parametrize(
    ("new", "words"),
    [
        ("raise NotImplementedError('x')", "NotImplementedError: x"),
        ("return None", "on() returned None"),
        ("return [Start(5, 1)]", "rank 5"),
        ("return []", "no Start or Finish"),
    ],
)
def test_a_mistake_in_it_is_one_line_with_the_way_past_it(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, new: str, words: str
) -> None:
    mine(monkeypatch, BEGIN, f"{new}\n            case Ended")
    with pytest.raises(DecisionError) as caught:
        launched("")
    said = str(caught.value)
    assert said.startswith("process_group.launch ")
    assert words in said
    assert said.endswith(" distlab use reference process_group.launch")
    assert "\n" not in said
    assert (".py:" in said) == new.startswith("raise")
