"""Install torch and distlab into the Python that runs this file.

A script for a fresh virtual environment, before anything is installed:

    python -m venv .venv
    .venv/bin/python distlab/install.py [--torch auto|cpu|default] [--extras dev]

`python -m distlab setup` makes that environment first, see set_up.py. This file
uses the standard library only. Two decisions are made here and nowhere else. On
Linux the plain torch wheel brings gigabytes of CUDA, so a Linux machine without an
NVIDIA GPU gets PyTorch's small CPU build. And whoever has told pip where wheels come
from (a mirror, a folder of wheels) has decided already: only there do we look for one.

``choose_torch`` decides on plain inputs; ``install`` does what was decided.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

# PyTorch's own documented index of CPU-only wheels; the only address given to pip.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
WISHES = ("auto", "cpu", "default")
COURSE = ("course",)  # the extras that a clone is always installed with

# Exit codes. set_up.py keeps an environment after REFUSED, where pip gave up before it
# wrote anything, and rebuilds it after the others.
OK, REFUSED, USAGE, HALF_DONE, INTERRUPTED = 0, 1, 2, 3, 130

HEARTBEAT_S = 20.0  # a silent minute looks like a hang; some lines in it do not
LAST_LINES = 12  # of pip's output, shown when it fails: its reason is at the end


@dataclass(frozen=True)
class TorchPlan:
    """How torch gets here.

    ``torch`` is ``keep`` (a fitting one is installed), ``cpu`` (from ``CPU_INDEX``),
    ``small`` (the CPU build if pip's own sources have one) or ``pip`` (whatever pip
    finds by itself); ``why`` is shown to the person waiting.
    """

    torch: str
    why: str


@dataclass(frozen=True)
class PipResult:
    """What one run of pip left: its exit code and its output, line by line."""

    code: int
    lines: Sequence[str] = ()


Pip = Callable[[Sequence[str]], PipResult]
Say = Callable[[str], None]


class InstallError(Exception):
    """Nothing can be installed from here; the message is one sentence for the user."""


# ---------------------------------------------------------------- deciding


def choose_torch(
    wish: str,
    *,
    system: str,
    machine: str,
    has_gpu: bool,
    sources: Sequence[str],
    installed: str | None,
    wanted: str,
) -> TorchPlan:
    """Decide how to install torch; touches nothing.

    Args:
        wish: ``auto``, ``cpu`` or ``default`` (plain pip).
        system: as ``platform.system()`` gives it.
        machine: as ``platform.machine()`` gives it.
        has_gpu: whether an NVIDIA GPU or its driver is here.
        sources: names of the pip options that already say where wheels come from.
        installed: the installed torch's version, if there is one.
        wanted: the requirement, such as ``torch>=2.11,<2.15``.
    """
    if installed is not None and satisfies(installed, wanted):
        return TorchPlan("keep", f"{installed} is already here")
    if wish == "cpu":
        return TorchPlan("cpu", "the CPU build was asked for")
    if wish == "default":
        return TorchPlan("pip", "pip's own choice was asked for")
    leaves_it = system != "Linux" or has_gpu
    if sources:
        named = ", ".join(sources)
        why = f"pip's own settings ({named}) say where to get it"
        return TorchPlan("pip" if leaves_it else "small", why)
    if system != "Linux" or machine not in {"x86_64", "aarch64"}:
        return TorchPlan(
            "pip", f"pip's own choice is the right one on {system} {machine}"
        )
    if has_gpu:
        return TorchPlan("pip", "an NVIDIA GPU is here, so torch comes with CUDA")
    return TorchPlan("cpu", "no NVIDIA GPU here, so the small CPU build")


def satisfies(version: str, requirement: str) -> bool:
    """Whether a release lies in a range such as ``torch>=2.11,<2.15``.

    Only plain releases and numeric bounds are judged (a local label such as ``+cpu``
    is ignored); for anything else the answer is no, and pip then decides.
    """
    release = _release(version.partition("+")[0])
    bounds = re.findall(r"(>=|<=|==|!=|>|<)\s*([^,;\s]+)", requirement)
    if release is None or not bounds:
        return False
    return all(_within(release, sign, _release(bound)) for sign, bound in bounds)


def _release(text: str) -> tuple[int, ...] | None:
    if not re.fullmatch(r"\d+(\.\d+)*", text):
        return None
    numbers = [int(part) for part in text.split(".")]
    while numbers and numbers[-1] == 0:  # 2.11 and 2.11.0 are the same release
        numbers.pop()
    return tuple(numbers)


def _within(release: tuple[int, ...], sign: str, bound: tuple[int, ...] | None) -> bool:
    if bound is None:
        return False
    return {
        ">=": release >= bound,
        "<=": release <= bound,
        "==": release == bound,
        "!=": release != bound,
        ">": release > bound,
        "<": release < bound,
    }[sign]


def wheel_sources(config_list: str) -> list[str]:
    """Name the options in ``pip config list``'s output that say where wheels are.

    The environment counts too: pip lists ``PIP_FIND_LINKS`` as ``:env:.find-links``.
    """
    found = set()
    for line in config_list.splitlines():
        key, equals, value = line.partition("=")
        section, dot, option = key.strip().rpartition(".")
        option = option.lower().replace("_", "-")
        if not (equals and dot) or section not in {"global", "install", ":env:"}:
            continue
        switched_on = _plain(value).lower() not in {"", "0", "false", "no", "off"}
        places = {"find-links", "index-url", "extra-index-url", "no-index"}
        if switched_on and option in places:
            found.add(option)
    return sorted(found)


def _plain(value: str) -> str:
    try:
        return str(ast.literal_eval(value.strip())).strip()
    except (ValueError, SyntaxError):
        return value.strip()


def read_wish(flag: str, environ: Mapping[str, str]) -> str:
    """``--torch`` if it says something, else ``DISTLAB_TORCH``, else ``auto``."""
    wish = environ.get("DISTLAB_TORCH", "").strip() or "auto"
    if flag != "auto":
        return flag
    if wish not in WISHES:
        choices = ", ".join(WISHES)
        raise InstallError(f"DISTLAB_TORCH is {wish!r}; it can be one of {choices}.")
    return wish


# ---------------------------------------------------------------- looking


def has_nvidia_gpu(
    exists: Callable[[str], bool] = os.path.exists,
    which: Callable[[str], str | None] = shutil.which,
) -> bool:
    """Whether this machine has an NVIDIA driver, device or tool."""
    return (
        exists("/proc/driver/nvidia/version")
        or exists("/dev/nvidia0")
        or which("nvidia-smi") is not None
    )


def torch_requirement(pyproject: Path) -> str:
    """The line of ``pyproject.toml``, or of a wheel, that says which torch we need."""
    import tomllib  # here, so that an older Python reaches the sentence about its age

    try:
        if pyproject.is_file():
            with pyproject.open("rb") as file:
                needs = tomllib.load(file)["project"]["dependencies"]
        else:
            needs = importlib.metadata.requires("distlab") or []  # from a wheel
        return next(str(n) for n in needs if re.match(r"torch\b(?!-)", n))
    except (OSError, ValueError, LookupError, StopIteration, ImportError) as error:
        raise InstallError(
            f"{pyproject} does not say which torch distlab needs"
            f" ({type(error).__name__}); is this a whole checkout?"
        ) from error


def is_clone(root: Path = ROOT) -> bool:
    """Return True in a clone; a wheel has no ``pyproject.toml``."""
    return (root / "pyproject.toml").is_file()


def target(extras: Sequence[str], *, clone: bool) -> list[str]:
    """Return what pip is to install: the clone, or what an installed wheel needs."""
    wanted = [*COURSE, *extras] if clone else list(extras)
    named = f"[{','.join(wanted)}]" if wanted else ""
    return ["-e", f".{named}"] if clone else [f"distlab{named}"]


def installed_torch() -> str | None:
    """Version of the installed torch, without importing it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


# ---------------------------------------------------------------- doing


def install(
    plan: TorchPlan, *, wanted: str, target: Sequence[str], pip: Pip, say: Say
) -> int:
    """Carry out a plan with the given pip; returns the exit code.

    ``target`` are the arguments of ``pip install`` for distlab itself.
    """
    minutes = "about a minute" if plan.torch in {"cpu", "keep"} else "1 to 5 minutes"
    small = None
    if plan.torch == "cpu":
        say(f"torch: {plan.why} (a download of about 200 MB; 1 to 3 minutes)")
        # Two retries: where the index is out of reach, pip's own choice is waiting.
        result = pip(["install", wanted, "--index-url", CPU_INDEX, "--retries", "2"])
        failure = _explain(result)
        if failure is not None and not failure.elsewhere:
            return _give_up(result, failure, say)
        if failure is not None and (small := _small_build(pip, wanted)) is None:
            say(
                f"torch: {CPU_INDEX} {failure.elsewhere}, so pip chooses the build"
                " (it may be gigabytes larger)"
            )
            minutes = "several minutes"
    else:
        say(f"torch: {plan.why}")
        small = _small_build(pip, wanted) if plan.torch == "small" else None
    if small is not None:
        say(f"torch: {small}, the small build that pip's sources have")
        result = pip(["install", f"torch=={small}"])
        failure = _explain(result)
        if failure is not None:
            return _give_up(result, failure, say)
        minutes = "about a minute"
    named = " ".join(target)
    say(f"distlab: pip install {named}, with the libraries it needs ({minutes})")
    result = pip(["install", *target])
    failure = _explain(result)
    return OK if failure is None else _give_up(result, failure, say)


def _small_build(pip: Pip, wanted: str) -> str | None:
    """The newest CPU build that fits and that pip itself can find: ``2.13.0+cpu``.

    An index may have a newer torch, but only with CUDA, which is gigabytes larger.
    """
    listed = pip(["index", "versions", "torch"])
    builds = re.findall(r"\d+(?:\.\d+)+\+cpu\b", "\n".join(listed.lines))
    return next((build for build in builds if satisfies(build, wanted)), None)


@dataclass(frozen=True)
class _Failure:
    """What some lines of pip mean.

    ``elsewhere`` is set where another index could still do it: what is wrong with this.
    """

    pattern: str
    sentence: str
    code: int = REFUSED
    elsewhere: str = ""


# The most certain first: an unreachable index, too, ends in "No matching distribution".
_FAILURES = (
    _Failure(
        r"No space left on device|Disk quota exceeded",
        "The disk is full; free about 2 GB and run this again.",
        HALF_DONE,
    ),
    _Failure(
        r"externally-managed-environment",
        "This Python belongs to the operating system; to make .venv, run `make` or"
        " `python -m distlab setup`.",
    ),
    _Failure(
        r"Permission denied",
        "This environment is not yours to write to; to make .venv, run `make` or"
        " `python -m distlab setup`.",
    ),
    _Failure(
        r"name resolution|Name or service not known|nodename nor servname|getaddrinfo"
        r"|establish a new connection|NewConnectionError|Max retries exceeded"
        r"|timed out|Network is unreachable|ProxyError|SSLError|CERTIFICATE_VERIFY"
        r"|HTTP error|Could not fetch URL|IncompleteRead|Connection (reset|aborted)",
        "pip could not reach its package index: is there a network here?",
        elsewhere="cannot be reached",
    ),
    _Failure(
        r"No matching distribution found",
        "pip found no wheel for this Python on this machine; with Python 3.12"
        " (make PYTHON=python3.12) it is most likely to.",
        elsewhere="has no wheel for this Python",
    ),
)
_UNKNOWN = _Failure("", "pip did not succeed; its last lines say why.", HALF_DONE)


def _explain(result: PipResult) -> _Failure | None:
    if result.code == 0:
        return None
    text = "\n".join(result.lines)
    found = (failure for failure in _FAILURES if re.search(failure.pattern, text))
    return next(found, _UNKNOWN)


def _give_up(result: PipResult, failure: _Failure, say: Say) -> int:
    for line in result.lines[-LAST_LINES:]:
        say(f"  pip: {line}")
    say(failure.sentence)
    return failure.code


def activity(lines: Sequence[str]) -> str:
    """What pip does, from what it has printed so far; empty if it has not said."""
    for line in reversed(lines):
        found = re.match(r"\s*(Collecting|Downloading|Building wheel for) (\S+)", line)
        if found:
            name = re.split(r"[-<>=!~;\[ ]", found[2].rpartition("/")[2])[0]
            return f"{found[1].split()[0].lower()} {name}"
        if line.startswith("Installing collected packages: "):
            return f"installing {line.count(',') + 1} packages"
    return ""


def real_pip(arguments: Sequence[str]) -> PipResult:
    """Run this interpreter's pip in the repository's root, and wait for it.

    It prints nothing here; now and then a line says what it does.
    """
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check"]
    started = time.monotonic()
    # A file and not a pipe: nothing has to be read while we wait.
    with tempfile.TemporaryDirectory() as folder, _at(folder).open("wb") as output:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,  # pip must never sit and wait for an answer
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while True:
                try:
                    code = child.wait(HEARTBEAT_S)
                    break
                except subprocess.TimeoutExpired:
                    doing = activity(_lines(_at(folder))) or "still at it"
                    _say(f"  {time.monotonic() - started:.0f} s: {doing}")
        except BaseException:
            child.terminate()  # Ctrl-C has reached pip too, unless only we were told
            child.wait()
            raise
        return PipResult(code, _lines(_at(folder)))


def _at(folder: str) -> Path:
    return Path(folder) / "pip.txt"


def _lines(file: Path) -> list[str]:
    text = file.read_text(encoding="utf-8", errors="replace")
    return [line for line in text.splitlines() if line.strip()]


def shown_pip(arguments: Sequence[str]) -> PipResult:
    """Show the command and do nothing: the pip of ``--dry-run``."""
    quoted = [f'"{a}"' if re.search(r"[<>\[\s]", a) else a for a in arguments]
    _say("  would run: python -m pip " + " ".join(quoted))
    return PipResult(0)


def _pip_settings() -> str:
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    # Without an answer pip has no settings that we could disturb.
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def _say(line: str) -> None:
    print(line, flush=True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python distlab/install.py",
        description="Install torch and distlab into this Python.",
    )
    parser.add_argument(
        "--torch",
        choices=WISHES,
        default="auto",
        help="which build: auto (DISTLAB_TORCH decides, else the machine), cpu, or"
        " default (whatever pip finds)",
    )
    parser.add_argument(
        "--extras", default="", help="extras of pyproject.toml, separated by commas"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands without running them"
    )
    return parser.parse_args(argv)


def _run(argv: Sequence[str] | None) -> int:
    options = _parse(argv)
    if sys.version_info < OLDEST_PYTHON:
        raise InstallError(
            f"This is Python {platform.python_version()}; distlab needs 3.11 or newer."
        )
    if PathFinder.find_spec("pip") is None:  # setuptools has a finder of its own
        raise InstallError(
            "This Python has no pip; `make` or `python -m distlab setup` brings one."
        )
    wanted = torch_requirement(ROOT / "pyproject.toml")
    plan = choose_torch(
        read_wish(options.torch, os.environ),
        system=platform.system(),
        machine=platform.machine(),
        has_gpu=has_nvidia_gpu(),
        sources=wheel_sources(_pip_settings()),
        installed=installed_torch(),
        wanted=wanted,
    )
    code = install(
        plan,
        wanted=wanted,
        target=target(
            [extra for extra in options.extras.split(",") if extra], clone=is_clone()
        ),
        pip=shown_pip if options.dry_run else real_pip,
        say=_say,
    )
    if code == OK:
        _say("nothing was done (--dry-run)" if options.dry_run else "installed")
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Install; returns the exit code. Never a traceback: one sentence instead."""
    try:
        return _run(argv)
    except InstallError as error:
        _say(str(error))
        return USAGE
    except KeyboardInterrupt:
        _say("Stopped by you; run it again to start over cleanly.")
        return INTERRUPTED
    except OSError as error:
        _say(f"The set-up could not run: {error}.")
        return HALF_DONE


if __name__ == "__main__":
    sys.exit(main())
