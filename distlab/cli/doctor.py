"""`distlab doctor`: can this machine do the course, and if not, what to do about it.

Every finding is a measurement made now, on this machine: a real connection, a real
write, a real start of four ranks. Each probe takes what it measures as arguments, so
that a test can hand it a broken machine.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil  # type: ignore[import-untyped]
from packaging.requirements import Requirement

State = Literal["ok", "warn", "broken"]

GIB = 2**30
NUM_RANKS = 4
FEWEST_FILES = 256  # macOS's default, and enough for the course's eight ranks
LEAST_MEMORY_GIB = 1.0  # four spawned ranks with torch, where fork is not to be had
HOST_NAME_BOUND_S = 2.0
LOOPBACK_BOUND_S = 5.0
READY = (
    "Ready. Nothing leaves this computer, and you need neither a GPU nor an account."
)


@dataclass(frozen=True)
class Finding:
    """One finding; `advice` says what to do if it isn't ok."""

    name: str
    state: State
    figure: str
    detail: str = ""
    advice: str = ""


@dataclass(frozen=True)
class StartUp:
    """Results of starting four ranks twice; `problem` is empty if all is fine."""

    first_s: float = 0.0  # with the import of torch, once per cluster
    warm_s: float = 0.0
    values: Sequence[object] = ()
    problem: str = ""


@dataclass(frozen=True)
class TorchFacts:
    """Facts that an installed torch reports about itself."""

    version: str
    build: str
    num_gpus: int
    has_gloo: bool


def check_python(version: tuple[int, ...]) -> Finding:
    """Check that Python is new enough."""
    figure = ".".join(map(str, version[:3]))
    if version < (3, 11):
        advice = "Install Python 3.11 or newer, then run: make PYTHON=python3.12"
        return Finding("python", "broken", figure, advice=advice)
    return Finding("python", "ok", figure)


def check_torch(facts: Callable[[], TorchFacts], wanted: str) -> Finding:
    """Check which torch is installed, and that it can do what the course needs.

    Args:
        facts: asks the installed torch; may raise whatever importing it raises.
        wanted: the requirement, such as `torch>=2.11,<2.15`; empty when unknown.
    """
    try:
        found = facts()
    except Exception as error:
        figure = f"can't be imported: {_brief(error)}"
        advice = "Set it up again: rm -r .venv, then make test"
        return Finding("torch", "broken", figure, advice=advice)
    gpus = f"{found.num_gpus} GPU" + "s" * (found.num_gpus != 1)
    seen = "" if found.build == "cpu" else f", {gpus} seen"
    figure = f"{found.version.partition('+')[0]}, {found.build} build{seen}"
    if not found.has_gloo:
        advice = "This torch lacks gloo. Try: python distlab/install.py --torch cpu"
        return Finding("torch", "broken", figure, advice=advice)
    if wanted and not Requirement(wanted).specifier.contains(found.version):
        advice = f"We test with {wanted}; to install it: python distlab/install.py"
        return Finding("torch", "warn", figure, advice=advice)
    return Finding("torch", "ok", figure)


def check_cores(usable: int, in_machine: int) -> Finding:
    """Count the cores that the ranks share."""
    detail = f"of {in_machine} in this machine" if usable < in_machine else ""
    if usable < 2:
        advice = "That's fine. The ranks take turns, so everything just takes longer."
        return Finding("cores", "warn", str(usable), detail, advice)
    return Finding("cores", "ok", str(usable), detail)


def check_memory(total_bytes: int, free_bytes: int) -> Finding:
    """Measure the memory, and how much of it is free."""
    figure = f"{total_bytes / GIB:.1f} GiB"
    detail = f"{free_bytes / GIB:.1f} GiB free"
    if free_bytes < LEAST_MEMORY_GIB * GIB:
        advice = (
            f"Close other programs; four ranks may need {LEAST_MEMORY_GIB:.0f} GiB."
        )
        return Finding("memory", "warn", figure, detail, advice)
    return Finding("memory", "ok", figure, detail)


def check_open_files(limit: int | None) -> Finding:
    """Check how many files and sockets a process may open; None means no limit."""
    if limit is None:
        return Finding("open files", "ok", "no limit")
    if limit < FEWEST_FILES:
        advice = "Raise the limit in this terminal: ulimit -n 1024"
        return Finding("open files", "warn", f"{limit:,}", advice=advice)
    return Finding("open files", "ok", f"{limit:,}")


def check_loopback(
    connect: Callable[..., socket.socket] = socket.create_connection,
) -> Finding:
    """Check that this machine can talk to itself: bind, connect, send, receive."""
    word = b"distlab"
    started = time.perf_counter()
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(LOOPBACK_BOUND_S)
            # The kernel completes the connection before accept: no thread is needed.
            with connect(server.getsockname(), timeout=LOOPBACK_BOUND_S) as near:
                far, _ = server.accept()
                with far:
                    far.settimeout(LOOPBACK_BOUND_S)
                    near.sendall(word)
                    far.sendall(far.recv(len(word)))
                    heard = near.recv(len(word))
    except OSError as error:
        advice = "A firewall or sandbox blocks 127.0.0.1. Allow connections to it."
        return Finding("loopback", "broken", _brief(error), advice=advice)
    if heard != word:
        advice = "Something changes the bytes we send to 127.0.0.1. Is there a proxy?"
        return Finding("loopback", "broken", "wrong echo", advice=advice)
    elapsed_ms = 1000 * (time.perf_counter() - started)
    return Finding("loopback", "ok", f"127.0.0.1 echoes in {elapsed_ms:.1f} ms")


def check_host_name(
    resolve: Callable[[], str], bound_s: float = HOST_NAME_BOUND_S
) -> Finding:
    """Check that this machine can look up its own name quickly.

    On a laptop away from its usual network, the lookup can take half a minute, and
    plain torch does it when it starts. If the lookup is slow, we leave its thread
    running and don't wait for it.
    """
    answers: list[str] = []
    problems: list[str] = []

    def look_up() -> None:
        try:
            answers.append(resolve())
        except Exception as error:
            problems.append(_brief(error))

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(bound_s)
    if answers:
        return Finding("host name", "ok", answers[0])
    figure = problems[0] if problems else f"no answer in {bound_s:g} s"
    advice = "That's fine for distlab. For plain torchrun: export GLOO_SOCKET_IFNAME="
    advice += "lo0" if sys.platform == "darwin" else "lo"
    return Finding("host name", "warn", figure, advice=advice)


def check_state_folder(folder: Path | None) -> Finding:
    """Check that we can save progress, and leave nothing behind."""
    if folder is None:
        advice = "Change into your checkout of this repository and try again."
        return Finding("progress", "warn", "outside the repository", advice=advice)
    there = next(p for p in (folder, *folder.parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"distlab")
    except OSError as error:
        figure = f"{folder.name} isn't writable: {_brief(error)}"
        advice = "Set DISTLAB_STATE to a folder that you can write to."
        return Finding("progress", "warn", figure, advice=advice)
    return Finding("progress", "ok", f"{folder.name} is writable")


def check_start(start: Callable[[], StartUp]) -> Finding:
    """Check that four ranks start, talk and agree, and time a warm start."""
    name = f"{NUM_RANKS} ranks"
    try:
        seen = start()
    except Exception as error:
        seen = StartUp(problem=_brief(error))
    expected = [sum(range(1, NUM_RANKS + 1))] * NUM_RANKS
    if not seen.problem and list(seen.values) != expected:
        seen = StartUp(
            problem=f"they computed {list(seen.values)} instead of {expected[0]}"
        )
    if seen.problem:
        advice = "Fix whatever isn't ok above, then run: distlab doctor --json"
        return Finding(name, "broken", seen.problem, advice=advice)
    figure = f"started and agreed in {seen.warm_s:.2f} s"
    return Finding(
        name, "ok", figure, f"{seen.first_s:.1f} s including the import of torch"
    )


def diagnose() -> list[Finding]:
    """Check everything; this takes a few seconds, mostly to import torch twice."""
    return list(_findings())


def doctor(*, as_json: bool = False) -> int:
    """Print the findings line by line; return 0 if fine, 1 if something is broken."""
    return tell(_findings(), as_json=as_json, ready=READY)


def tell(found: Iterator[Finding], *, as_json: bool, ready: str) -> int:
    """Print findings as they come, and `ready` at the end if none is broken."""
    if as_json:
        findings = list(found)
        code = _exit_code(findings)
        rows = [asdict(finding) for finding in findings]
        print(json.dumps({"findings": rows, "exit": code}))
        return code
    from rich.console import Console

    console = Console(highlight=False)
    findings = []
    for finding in found:
        for line in render(finding):
            console.print(line, no_wrap=True, overflow="ellipsis")
        findings.append(finding)
    broken = [finding.name for finding in findings if finding.state == "broken"]
    if broken or ready:
        console.print(_verdict(broken, ready), markup=False)
    return _exit_code(findings)


def render(finding: Finding) -> list[str]:
    """Return a line of rich markup, and another one with any advice."""
    from rich.markup import escape

    color = {"ok": "green", "warn": "yellow", "broken": "bold red"}[finding.state]
    detail = f"  [dim]{escape(finding.detail)}[/]" if finding.detail else ""
    state = f"[{color}]{finding.state:6}[/]"
    lines = [f"{finding.name:10}  {state}  {escape(finding.figure)}{detail}"]
    if finding.advice:
        lines.append(f"  {escape(finding.advice)}")
    return lines


def _verdict(broken: Sequence[str], ready: str) -> str:
    return f"Not ready yet: {', '.join(broken)}." if broken else ready


def _exit_code(findings: Sequence[Finding]) -> int:
    return int(any(finding.state == "broken" for finding in findings))


def _findings() -> Iterator[Finding]:
    yield check_python(tuple(sys.version_info[:3]))
    yield check_torch(_torch_facts, _torch_wanted())
    yield check_cores(_usable_cores(), os.cpu_count() or 1)
    yield check_memory(*_memory())
    yield check_open_files(_open_files_limit())
    yield check_loopback()
    yield check_host_name(_resolve_host_name)
    yield check_state_folder(_state_folder())
    yield check_start(_start_twice)


# ------------------------------------------------------------ asking the machine


def _torch_facts() -> TorchFacts:
    import torch
    import torch.distributed as dist

    build = "cpu"
    if torch.version.cuda:
        build = f"CUDA {torch.version.cuda}"
    elif torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    with warnings.catch_warnings():
        # A CUDA build warns where it finds no driver; the count of 0 says the same.
        warnings.simplefilter("ignore")
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    has_gloo = dist.is_available() and dist.is_gloo_available()
    return TorchFacts(torch.__version__, build, num_gpus, has_gloo)


def _torch_wanted() -> str:
    try:
        needs = importlib.metadata.requires("distlab") or []
    except importlib.metadata.PackageNotFoundError:  # run from a bare checkout
        return ""
    return next((need for need in needs if need.startswith("torch")), "")


def _usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():  # a container's share
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def _memory(cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    total, free = int(memory.total), int(memory.available)
    limit, used = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    if limit.strip().isdigit() and int(limit) < total:  # a container's share
        total = int(limit)
        rows = (line.split() for line in _read(cgroup / "memory.stat").splitlines())
        cached = next((int(row[1]) for row in rows if row[0] == "file"), 0)
        left = total - int(used) + cached if used.strip().isdigit() else total
        free = min(free, left)
    return total, free


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _open_files_limit() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _resolve_host_name() -> str:
    name = socket.getfqdn()
    return f"{name} is {socket.gethostbyname(socket.gethostname())}"


def _state_folder() -> Path | None:
    from distlab.curriculum import CurriculumError, Progress, find_root

    try:
        return Progress(find_root()).folder.absolute()
    except CurriculumError:
        return None


def _start_twice() -> StartUp:
    from distlab.ranks import new_cluster
    from distlab.runner.selftest import all_agree

    began = time.perf_counter()
    with new_cluster() as cluster:
        first = cluster.run(all_agree, NUM_RANKS)
        first_s = time.perf_counter() - began
        warm = cluster.run(all_agree, NUM_RANKS)
    for run in (first, warm):
        if run.outcome != "finished":
            return StartUp(problem=run.explanation)
    return StartUp(first_s, warm.seconds, warm.values)


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
