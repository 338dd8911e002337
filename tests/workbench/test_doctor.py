"""What doctor says is true, on a whole machine and on broken ones."""

from __future__ import annotations

import errno
import io
import json
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from distlab.cli import doctor as subject
from distlab.cli.doctor import Finding, StartUp, TorchFacts
from tests.workbench.golden import Golden

WANTED = "torch>=2.11,<2.15"
GOOD_TORCH = TorchFacts("2.13.0+cpu", "cpu", 0, True)
AGREED = StartUp(first_s=1.5, warm_s=0.1, values=[10, 10, 10, 10])


def raising(error: Exception) -> Callable[..., object]:
    def fail(*_: object, **__: object) -> object:
        raise error

    return fail


def test_python() -> None:
    assert subject.check_python((3, 11, 0)).state == "ok"
    old = subject.check_python((3, 10, 4))
    assert (old.state, old.figure) == ("broken", "3.10.4")


@pytest.mark.parametrize(
    ("facts", "state", "named"),
    [
        (GOOD_TORCH, "ok", ["2.13.0", "cpu"]),
        (TorchFacts("2.12.1", "CUDA 12.8", 0, True), "ok", ["2.12.1", "12.8", "0"]),
        (TorchFacts("2.12.1", "CUDA 12.8", 1, True), "ok", ["2.12.1", "12.8", "1"]),
        (TorchFacts("2.9.0+cpu", "cpu", 0, True), "warn", ["2.9.0", "cpu"]),
        (TorchFacts("2.13.0+cpu", "cpu", 0, False), "broken", ["2.13.0", "cpu"]),
    ],
)
def test_torch(facts: TorchFacts, state: str, named: list[str]) -> None:
    found = subject.check_torch(lambda: facts, WANTED)
    assert found.state == state
    assert re.findall(r"[\d.]*\d|cpu", found.figure) == named


def test_a_torch_that_cannot_be_imported_is_broken() -> None:
    error = OSError("libtorch.so: none\nmore")
    found = subject.check_torch(raising(error), WANTED)  # type: ignore[arg-type]
    assert found.state == "broken"
    assert found.figure.endswith("libtorch.so: none")


def test_an_unknown_range_is_not_held_against_torch() -> None:
    assert subject.check_torch(lambda: GOOD_TORCH, "").state == "ok"


def test_cores() -> None:
    assert subject.check_cores(8, 8).detail == ""
    share = subject.check_cores(2, 8)
    assert share.state == "ok"
    assert re.search(r"\b8\b", share.detail)
    assert subject.check_cores(1, 8).state == "warn"


def test_a_containers_share_of_cores_is_what_counts(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert subject._usable_cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert subject._usable_cores(tmp_path) == subject._usable_cores(tmp_path / "none")


def test_memory() -> None:
    gib = subject.GIB
    assert subject.check_memory(16 * gib, 9 * gib).state == "ok"
    assert subject.check_memory(16 * gib, gib // 2).state == "warn"


def test_a_containers_share_of_memory_is_what_counts(tmp_path: Path) -> None:
    mib = 2**20
    (tmp_path / "memory.max").write_text(f"{64 * mib}\n")
    (tmp_path / "memory.current").write_text(f"{48 * mib}\n")
    (tmp_path / "memory.stat").write_text(f"anon {8 * mib}\nfile {32 * mib}\n")
    # 48 MiB are used, but 32 of them are the page cache, which gives way.
    assert subject._memory(tmp_path) == (64 * mib, 48 * mib)
    total, free = subject._memory(tmp_path / "none")
    assert 64 * mib < free <= total


@pytest.mark.parametrize(
    ("limit", "state", "figure"),
    [(None, "ok", "no limit"), (256, "ok", "256"), (64, "warn", "64")],
)
def test_open_files(limit: int | None, state: str, figure: str) -> None:
    found = subject.check_open_files(limit)
    assert (found.state, found.figure) == (state, figure)


def test_loopback_is_really_used() -> None:
    reached: list[tuple[str, int]] = []

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        reached.append(address)
        return socket.create_connection(address, timeout=timeout)

    assert subject.check_loopback(connect).state == "ok"
    assert reached[0][0] == "127.0.0.1"


def test_a_refused_loopback_is_broken() -> None:
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    found = subject.check_loopback(raising(refused))  # type: ignore[arg-type]
    assert found.state == "broken"
    assert "Connection refused" in found.figure


def test_host_name() -> None:
    assert subject.check_host_name(lambda: "127.0.1.1").state == "ok"
    unknown = socket.gaierror(-2, "not-known")
    found = subject.check_host_name(raising(unknown))  # type: ignore[arg-type]
    assert found.state == "warn"
    assert "not-known" in found.figure
    assert "GLOO_SOCKET_IFNAME" in found.advice


def test_a_slow_name_server_holds_nobody_up() -> None:
    released = threading.Event()

    def slow() -> str:
        released.wait()
        return "at last"

    found = subject.check_host_name(slow, bound_s=0.01)  # would hang if it waited
    released.set()
    assert found.state == "warn"
    assert "0.01 s" in found.figure


def test_progress_can_be_kept_and_nothing_is_left_behind(tmp_path: Path) -> None:
    assert subject.check_state_folder(tmp_path / ".distlab").state == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / ".distlab").write_text("a file: nobody, root included, writes below it")
    found = subject.check_state_folder(tmp_path / ".distlab")
    assert found.state == "warn"
    assert "DISTLAB_STATE" in found.advice
    assert subject.check_state_folder(None).state == "warn"


def test_four_ranks() -> None:
    good = subject.check_start(lambda: AGREED)
    assert good.state == "ok"
    assert "0.10 s" in good.figure
    liars = subject.check_start(lambda: StartUp(values=[10, 10, 10, 9]))
    assert liars.state == "broken"
    assert "[10, 10, 10, 9]" in liars.figure
    hung = subject.check_start(lambda: StartUp(problem="rank 2"))
    assert (hung.state, hung.figure) == ("broken", "rank 2")
    missing = ImportError("No module named 'distlab.runner'")
    absent = subject.check_start(raising(missing))  # type: ignore[arg-type]
    assert (absent.state, absent.figure) == ("broken", str(missing))


def worst() -> list[Finding]:
    """Every finding as bad as it gets."""
    problem = OSError(errno.EPERM, "Operation not permitted " + "and more [1/2] " * 9)
    fail = raising(problem)
    return [
        subject.check_python((3, 9, 1)),
        subject.check_torch(fail, WANTED),  # type: ignore[arg-type]
        subject.check_cores(1, 64),
        subject.check_memory(2**20, 2**19),
        subject.check_open_files(3),
        subject.check_loopback(fail),  # type: ignore[arg-type]
        subject.check_host_name(fail),  # type: ignore[arg-type]
        subject.check_state_folder(None),
        subject.check_start(fail),  # type: ignore[arg-type]
    ]


def test_the_worst_machine_still_fits_on_a_screen(golden: Golden) -> None:
    screen = Console(file=io.StringIO(), width=80, highlight=False)
    for finding in worst():
        for line in subject.render(finding):
            screen.print(line, no_wrap=True, overflow="ellipsis")
    assert isinstance(screen.file, io.StringIO)
    lines = screen.file.getvalue().splitlines()
    assert len(lines) <= 22
    advice = [line for line in lines if line.startswith("  ")]
    assert len(advice) == len(worst())  # whatever is not ok comes with what to do
    assert not any(line.endswith("…") for line in advice)
    golden("cli/doctor-worst", "\n".join(lines))


def test_brackets_in_a_message_are_text_and_not_markup() -> None:
    line = subject.render(Finding("loopback", "broken", "[Errno 1] no"))[0]
    screen = Console(file=io.StringIO(), width=80)
    screen.print(line)
    assert isinstance(screen.file, io.StringIO)
    assert "[Errno 1] no" in screen.file.getvalue()


def test_this_machine_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    code = subject.doctor(as_json=True)
    told = json.loads(capsys.readouterr().out)
    states = {row["name"]: row["state"] for row in told["findings"]}
    assert (code, told["exit"]) == (0, 0), told
    assert states["loopback"] == states["4 ranks"] == "ok"
    assert all(row["advice"] for row in told["findings"] if row["state"] != "ok")
