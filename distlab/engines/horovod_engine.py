"""Run the worker in processes that horovodrun starts.

    fit() ─▶ horovodrun ─▶ rank.py in each process ─▶ train(job) ─▶ a file ─▶ fit()

Horovod's last release is from 2023 and doesn't build against today's torch as it is, so
`make test-horovod` builds it for C++20. Use it to migrate old code, not to write new.

Source: Horovod's documentation, "Horovod with PyTorch" and "Run Horovod".
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from distlab.engines import rank as ranks
from distlab.engines.config import DistributedConfig
from distlab.engines.expect import EngineError
from distlab.engines.horovod_parallel import HOW
from distlab.engines.outside import engine

GRACE_S = 10.0


def start_with_horovodrun(
    folder: Path, config: DistributedConfig, timeline: str | Path | None = None
) -> int:
    """Run rank.py with a folder on all ranks; return the exit code."""
    command = [sys.executable, ranks.__file__, str(folder)]
    return horovodrun(command, config, folder / "launch.txt", timeline)


def run_script_on_horovod(
    script: Path, arguments: Sequence[str], config: DistributedConfig, log_dir: Path
) -> int:
    """Run a user's script as every rank; return the exit code.

    Raises:
        EngineError: Horovod isn't installed, or there are several nodes.
    """
    expect_one_node(config)
    engine("horovod.torch", "horovod", HOW)
    said = log_dir / "horovodrun.txt"
    code = horovodrun([sys.executable, str(script), *arguments], config, said)
    if code:
        sys.stderr.write(said.read_text(encoding="utf-8", errors="replace"))
    return code


def horovodrun(
    command: Sequence[str],
    config: DistributedConfig,
    said: Path,
    timeline: str | Path | None = None,
) -> int:
    """Run `command` as every rank on this machine; write failures to `said`.

    Raises:
        EngineError: Horovod isn't installed.
    """
    engine("horovod.torch", "horovod", HOW)
    num_ranks = config.world_size
    run = [sys.executable, "-m", "horovod.runner.launch", "--gloo", f"-np={num_ranks}"]
    run += ["-H", f"localhost:{num_ranks}"]
    if timeline is not None:
        run += ["--timeline-filename", str(Path(timeline).resolve())]
    folders = os.pathsep.join(map(os.path.abspath, sys.path))
    # Several ranks on one machine: as many threads each as torchrun gives them.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": folders}
    with said.open("w", encoding="utf-8") as file:
        process = subprocess.Popen([*run, *command], env=environment, stderr=file)
        try:
            return process.wait()
        except BaseException:
            process.terminate()  # it ends its ranks
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise


def expect_one_node(config: DistributedConfig) -> None:
    """Refuse several nodes, for which horovodrun would need ssh.

    Raises:
        EngineError: the job has several nodes.
    """
    if config.num_nodes > 1:
        raise EngineError(
            f"num_nodes is {config.num_nodes}: start the script with horovodrun -H "
            "node0:…,node1:…, and it takes part"
        )
