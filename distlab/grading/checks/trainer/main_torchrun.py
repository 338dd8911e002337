"""The learner's file under a real torchrun, where `import distlab` fails.

The processes get a folder of their own, a session of their own, and a time limit at
whose end every one of them is ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from distlab.curriculum import UnitSource
from distlab.grading.checks.trainer.main_reference import right_weights
from distlab.grading.kit.flat import flat
from distlab.grading.kit.values import close
from distlab.grading.verdict import NotYetError
from distlab.runner.processes import descendants, end_descendants, reap

LIMIT_S = 120.0  # for a very busy machine; 2 free cores take about 6 s
EPOCHS = 3  # main's default
# When no line of the file failed: about one time in twenty, torch 2.13's gloo aborts a
# process that has done everything rightly, at its exit (seen on a busy machine).
_ATTEMPTS = 3
NO_DISTLAB = (
    'raise ImportError("there is no distlab here: it must run with torch alone")\n'
)


def expect_clean_end(source: UnitSource, world_size: int) -> float:
    """Have torchrun start the file and end with 0; how many seconds that took.

    Raises:
        NotYetError: it did not, or the weights it saved are wrong.
    """
    with tempfile.TemporaryDirectory(prefix="distlab-torchrun-") as name:
        folder = Path(name)
        script = folder / source.path.name
        script.write_text(source.text, encoding="utf-8")
        package = folder / "no_distlab" / "distlab"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(NO_DISTLAB, encoding="utf-8")
        started = time.monotonic()
        for _attempt in range(_ATTEMPTS):
            status, said = _run(folder, script, world_size)
            if not status or _own_traceback(said, script.name):
                break
        seconds = time.monotonic() - started
        if status != 0:
            raise _failed(status, said, script.name)
        _expect_weights(folder / "weights.pt")
    return seconds


def _run(folder: Path, script: Path, world_size: int) -> tuple[int | None, str]:
    """Exit status (None when time ran out) and everything that was printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1"]
    # Port 0: any that is free, as with --standalone, but by number and not by name.
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    command += ["--local-addr=127.0.0.1", f"--nproc-per-node={world_size}"]
    command += [f"--log-dir={folder}"]  # without it, torchrun leaves a folder in /tmp
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [*command, str(script)],
            cwd=folder,
            env=_environment(folder / "no_distlab"),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
        output.seek(0)
        return status, output.read().decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun, after what it started: that has sessions of its own."""
    if process.poll() is None:
        below = descendants(process.pid)
        end_descendants(process.pid)
        process.kill()
        process.wait()
        reap(below)  # orphans come to whoever has a cluster


def _environment(first: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(first), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _failed(status: int | None, said: str, script: str) -> NotYetError:
    how = f"failed with exit status {status}"
    if status is None:
        how = f"had not ended after {LIMIT_S:g} s"
    block = _own_traceback(said, script)
    reason = f": {block[-1][:200]}" if block else ""
    no_distlab = "there is no distlab here" in reason
    return NotYetError(
        f"under torchrun, the program {how}{reason}",
        slug="still-needs-distlab" if no_distlab else "",
        rule="main uses torch.distributed in place of comm" if no_distlab else "",
        output="\n".join(block or said.splitlines()[-30:]),
        fatal=True,
    )


def _own_traceback(said: str, script: str) -> list[str]:
    """The first traceback that comes from the file itself: torchrun has its own."""
    lines = said.splitlines()
    for number, line in enumerate(lines):
        if "Traceback (most recent call last)" not in line:
            continue
        prefix = line[: line.index("Traceback")]
        block = [line.removeprefix(prefix)]
        for following in lines[number + 1 :]:
            block.append(following.removeprefix(prefix))
            if block[-1] and not block[-1].startswith(" "):
                break
        if any(f'{script}"' in part for part in block):
            return block
    return []


def _expect_weights(path: Path) -> None:
    if not path.exists():
        raise NotYetError(
            f"under torchrun, main() wrote no {path.name}, expected this file, the "
            "default of path",
            rule="the line at the end of the file calls main() without arguments",
        )
    state = torch.load(path, weights_only=True)
    if not close(flat(state), right_weights(EPOCHS)):
        raise NotYetError(
            "under torchrun, the saved weights are wrong, though the same main was "
            "right in the grader's ranks",
            rule="the weights may depend only on rank, world size and epoch",
        )
