"""Install torch and distlab into the Python that runs this file.

A script for a fresh virtual environment, before anything is installed:

    python -m venv .venv
    .venv/bin/python distlab/install.py [--torch auto|cpu|default] [--extras dev]

`python -m distlab setup` makes that environment first, see set_up.py. This file uses
the standard library and pip only, and pip says itself what went wrong. There is one
decision: on Linux the plain torch wheel brings gigabytes of CUDA, so a machine without
an NVIDIA GPU gets the newest CPU build, from PyTorch's index or from where the user has
told pip to look.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

# PyTorch's own documented index of CPU-only wheels; the only address given to pip.
CPU_INDEX = ("--extra-index-url", "https://download.pytorch.org/whl/cpu")
# Where the index is out of reach, pip's own choice is waiting.
PATIENCE = ("--retries", "2")

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
WISHES = ("auto", "cpu", "default")
COURSE = ("course",)  # the extras that a clone is always installed with

# Exit codes. set_up.py keeps an environment after REFUSED, where pip gave up before it
# wrote anything, and rebuilds it after the others.
OK, REFUSED, USAGE, HALF_DONE, INTERRUPTED = 0, 1, 2, 3, 130

HEARTBEAT_S = 20.0  # a silent minute looks like a hang

Pip = Callable[[Sequence[str]], "tuple[int, str]"]
"""Runs pip, and returns its exit code and what `pip index` prints."""


class InstallError(Exception):
    """Nothing can be installed from here; the message is one sentence for the user."""


def wants_cpu_build(
    wish: str, *, system: str, machine: str, has_gpu: bool, installed: bool
) -> bool:
    """Decide whether to look for a CPU build of torch; touches nothing.

    Args:
        wish: ``auto``, ``cpu`` or ``default`` (plain pip).
        system: as ``platform.system()`` gives it.
        machine: as ``platform.machine()`` gives it.
        has_gpu: whether an NVIDIA GPU or its driver is here.
        installed: whether a torch that we can use is here.
    """
    if installed or wish == "default":
        return False
    is_known = system == "Linux" and machine in {"x86_64", "aarch64"}
    return wish == "cpu" or (is_known and not has_gpu)


def fits(version: str, requirement: str) -> bool:
    """Return True if a version fits a requirement such as ``torch>=2.11,<2.15``."""
    # pip's copy, since nothing else is installed yet. On Python 3.11, setuptools warns
    # when pip is imported after distutils.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pip._vendor.packaging.requirements import Requirement

    return Requirement(requirement).specifier.contains(version)


def read_wish(flag: str, environ: Mapping[str, str]) -> str:
    """``--torch`` if it says something, else ``DISTLAB_TORCH``, else ``auto``."""
    wish = environ.get("DISTLAB_TORCH", "").strip() or "auto"
    if flag != "auto":
        return flag
    if wish not in WISHES:
        choices = ", ".join(WISHES)
        raise InstallError(f"DISTLAB_TORCH is {wish!r}; it can be one of {choices}.")
    return wish


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


def install(is_cpu: bool, *, wanted: str, target: Sequence[str], pip: Pip) -> bool:
    """Install with the given pip; return True if it succeeded.

    ``wanted`` is the requirement of torch, and ``target`` are the arguments of ``pip
    install`` for distlab itself.
    """
    build = None
    if is_cpu:
        _, listed = pip(["index", "versions", "torch", *CPU_INDEX, *PATIENCE])
        builds = re.findall(r"\d+(?:\.\d+)+\+cpu\b", listed)
        build = next((one for one in builds if fits(one, wanted)), None)
        if build is None:
            print(
                "There is no CPU build of torch for this Python within reach, so pip "
                "chooses one, which may be gigabytes larger.",
                flush=True,
            )
    if build is not None:
        print(f"torch: the small CPU build, {build}, about 200 MB", flush=True)
        # What torch needs comes from the usual index, with distlab.
        one = ["install", "--no-deps", f"torch=={build}"]
        code, _ = pip([*one, *CPU_INDEX, *PATIENCE])
        if code:
            return False
    print("distlab: the libraries it needs (1 to 5 minutes)", flush=True)
    code, _ = pip(["install", "-qq", *target])  # errors are shown
    return code == 0


def real_pip(arguments: Sequence[str]) -> tuple[int, str]:
    """Run this interpreter's pip in the repository's root, and wait for it.

    It prints for itself, except that we return what `pip index` prints.
    """
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check"]
    asks = subprocess.PIPE if arguments[0] == "index" else None
    # pip must never sit and wait for an answer.
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=asks, stderr=asks, text=True
    ) as child:
        try:
            started = time.monotonic()
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    said, _ = child.communicate(timeout=HEARTBEAT_S)
                    break
                print(f"  {time.monotonic() - started:.0f} s", flush=True)
        except BaseException:
            child.terminate()  # Ctrl-C has reached pip too, unless only we were told
            raise
    return child.returncode, said or ""


def shown_pip(arguments: Sequence[str]) -> tuple[int, str]:
    """Show the command, and only ask for versions: the pip of ``--dry-run``."""
    if arguments[0] == "index":
        return real_pip(arguments)
    quoted = [f'"{a}"' if re.search(r"[<>\[\s]", a) else a for a in arguments]
    print("would run: python -m pip " + " ".join(quoted), flush=True)
    return 0, ""


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
    wanted, installed = torch_requirement(ROOT / "pyproject.toml"), installed_torch()
    is_cpu = wants_cpu_build(
        read_wish(options.torch, os.environ),
        system=platform.system(),
        machine=platform.machine(),
        has_gpu=has_nvidia_gpu(),
        installed=installed is not None and fits(installed, wanted),
    )
    extras = [extra for extra in options.extras.split(",") if extra]
    packages = Path(sysconfig.get_path("purelib"))
    before = packages.stat().st_mtime_ns
    is_done = install(
        is_cpu,
        wanted=wanted,
        target=target(extras, clone=is_clone()),
        pip=shown_pip if options.dry_run else real_pip,
    )
    if not is_done:
        print(
            "pip failed, and its last lines say why. It needs a network, about 2 GB of "
            "disk,\nand a Python for which torch has wheels: make PYTHON=python3.12 "
            "takes another.",
            flush=True,
        )
        return REFUSED if packages.stat().st_mtime_ns == before else HALF_DONE
    print("nothing was done (--dry-run)" if options.dry_run else "installed")
    return OK


def main(argv: Sequence[str] | None = None) -> int:
    """Install; returns the exit code. Never a traceback: one sentence instead."""
    try:
        return _run(argv)
    except InstallError as error:
        print(error)
        return USAGE
    except KeyboardInterrupt:
        print("Stopped by you; run it again to start over cleanly.")
        return INTERRUPTED
    except OSError as error:
        print(f"The set-up could not run: {error}.")
        return HALF_DONE


if __name__ == "__main__":
    sys.exit(main())
