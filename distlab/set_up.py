"""`python -m distlab setup` does what `make` does first, also where there is no make.

In a clone, it makes an environment in `.venv` and installs torch and distlab there. Two
files in it say how far it got. `.ready` holds the folder that the environment was made
for, because a copied or moved one is of no use. `.unfinished` exists while pip works,
so that we start over after an interruption. The Makefile reads `.ready` too.

Where distlab was installed from a wheel, there is no clone to set up, and it installs
the libraries that are missing into the Python that runs it.

It uses the standard library only, as install.py does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from distlab import install

READY, UNFINISHED = ".ready", ".unfinished"
Run = Callable[[Sequence[str]], "tuple[int, str]"]


def set_up(
    arguments: Sequence[str] = (),
    root: Path = install.ROOT,
    run: Run | None = None,
    *,
    windows: bool = os.name == "nt",
) -> int:
    """Make the environment of a clone, and install; return install.py's exit code.

    `arguments` are those of install.py. `run` runs a command and returns its exit code
    and its output, which is empty if the command may print for itself.
    """
    if not install.is_clone(root) or _ONLY_SHOWS & {*arguments}:
        return install.main(arguments)
    run = run or _run
    folder = root / ".venv"
    python = folder / ("Scripts/python.exe" if windows else "bin/python")
    if not _is_usable(folder, python, root):
        print("environment: an empty one in .venv (a few seconds)", flush=True)
        code, said = run([sys.executable, "-m", "venv", "--clear", str(folder)])
        if code == install.INTERRUPTED:
            return code
        if code:
            print(said, _NO_VENV, sep="\n", flush=True)
            return install.REFUSED
    (folder / UNFINISHED).touch()
    code, _ = run([str(python), str(root / "distlab" / "install.py"), *arguments])
    if code in (install.OK, install.REFUSED):  # pip changed all, or nothing
        (folder / UNFINISHED).unlink()
    if code == install.OK:
        (folder / READY).write_text(f"{root}\n", encoding="utf-8")
        activate = r".venv\Scripts\Activate.ps1" if windows else ". .venv/bin/activate"
        print(f"Once per terminal: {activate}", flush=True)
    return code


_ONLY_SHOWS = {"-h", "--help", "--dry-run"}

_NO_VENV = (
    "This Python can't make virtual environments. On Debian and Ubuntu: apt install "
    "python3-venv"
)


def _is_usable(folder: Path, python: Path, root: Path) -> bool:
    if not python.exists() or (folder / UNFINISHED).exists():
        return False
    try:
        made_for = (folder / READY).read_text(encoding="utf-8").strip()
    except OSError:
        return False
    return made_for == str(root)


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Run a command whose output the user waits for, or the quick one that makes .venv.

    A Ctrl-C reaches the command too, so we wait for its end.
    """
    quiet = command[1:3] == ["-m", "venv"]
    wanted = subprocess.PIPE if quiet else None
    with subprocess.Popen(
        command, stdout=wanted, stderr=subprocess.STDOUT if quiet else None, text=True
    ) as process:
        try:
            said, _ = process.communicate()
        except KeyboardInterrupt:
            process.wait()
            return install.INTERRUPTED, ""
    return process.returncode, said or ""
