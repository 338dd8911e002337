"""The pictures of the README, from runs made here; `python -m figures.readme`.

Nothing in them is typed by hand: the autopsy is the grader's verdict on a wrong
`ring_shift`, the report is what `distlab run` prints about a script that hangs, and the
timeline is the journal of four ranks of which one leaves early.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import torch

from distlab.curriculum import load, load_curriculum
from distlab.grading.grade import Grader
from distlab.grading.report import lines_of
from distlab.runner import Cluster, RankContext
from distlab.trace import draw_timeline
from distlab.trace.palette import COMPLETE_TEXT, FAILURE_TEXT, HIGHLIGHT, INK, MUTED
from figures.draw import Canvas, write

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "figures"
COURSE = ("curriculum.toml", "solutions", "phase1_data_parallel", "phase2_advanced")

_HOLE = re.compile(
    r" *# TODO\(collectives\.pass_around\)\n(?: *#.*\n)* *raise NotImplementedError.*\n"
)
_WRONG = """\
    n = comm.world_size
    comm.send(outgoing, (comm.rank + 1) % n)
    comm.recv(incoming, (comm.rank - 1) % n)
"""
_RUNS = 8  # of the script that hangs, at most
_TRAIN = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(100):
    loss = model(torch.randn(16, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and step % 10 == 9:
        torch.save(model.module.state_dict(), "model.pt")
        dist.barrier()
"""
_INKS = {
    "pass": COMPLETE_TEXT,
    "fail": FAILURE_TEXT,
    "dim": MUTED,
    "rule": HIGHLIGHT,
    "plain": INK,
}


def leave_early(context: RankContext) -> None:
    """all_reduce on three ranks of four: the last one has other plans."""
    if context.rank < context.world_size - 1:
        load("collectives").all_reduce(context.comm, torch.ones(2))


def hang(cluster: Cluster) -> str:
    """The verdict on a ring of sends, as the terminal shows it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name in COURSE:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder) / name)
        curriculum = load_curriculum(Path(folder).resolve())
        template = curriculum.units["collectives"].template(Path(folder))
        template.write_text(_HOLE.sub(_WRONG, template.read_text()))
        report = Grader(curriculum, cluster).grade([curriculum.task("1.2")])
        # How long it took differs from run to run; the picture must not.
        lines = [
            (s, re.sub(r" +\d+\.\d\d s$", "", t)) for s, t in lines_of(report.tasks[0])
        ]
    title = "distlab check on a ring of sends"
    return _terminal("hang", 760, title, "$ distlab check 1.2", lines)


def _told_of_the_hang() -> list[str]:
    """The lines of the launcher, without its name."""
    command = [sys.executable, "-m", "distlab", "run", "-n", "4", "train.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(_TRAIN)
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 1, done.stderr
    return [
        line.removeprefix("[distlab]").removeprefix(" ")
        for line in done.stderr.splitlines()
        if line.startswith("[distlab]")
    ]


def _seen_waiting(told: list[str]) -> int:
    """How many of the ranks' rows say so; one may still be on its way there."""
    return sum(bool(re.match(r"\d +waiting", line)) for line in told)


def report() -> str:
    """What `distlab run` prints about a script whose rank 0 waits alone.

    A rank that comes to its backward() before rank 0 comes to the barrier has started
    an all_reduce there, and the report says so. We draw the usual case, in which no
    rank has, and all of them were seen to wait.
    """
    told: list[str] = []
    for _ in range(_RUNS):
        told = _told_of_the_hang()
        if "ranks 1–3 in backward" in told[0] and _seen_waiting(told) == 4:
            break
    lines = []
    for number, line in enumerate(told):
        style = (
            "fail" if number == 0 else "dim" if line.startswith("rank ") else "plain"
        )
        rows = (
            [line] if line.startswith(("rank ", *"0123")) else textwrap.wrap(line, 92)
        )
        lines += [(style, row) for row in rows or [""]]
    title = "distlab run on a script that hangs"
    return _terminal("report", 800, title, "$ distlab run -n 4 train.py", lines)


def _terminal(
    name: str, width: int, title: str, command: str, lines: list[tuple[str, str]]
) -> str:
    """A command and the lines that it prints."""
    c = Canvas(
        name,
        width,
        46 + 22 * len(lines),
        title=title,
        desc=" ".join(" ".join(text.split()) for _, text in lines),
    )
    c.text(20, 26, command, size=13, anchor="start", mono=True)
    for row, (style, text) in enumerate(lines):
        indent = len(text) - len(text.lstrip())
        spaced = text.strip().replace(" ", "\u00a0")  # SVG folds runs of spaces
        bold = style == "fail"
        c.text(
            20 + 8 * indent,
            52 + 22 * row,
            spaced,
            size=13,
            color=_INKS[style],
            anchor="start",
            mono=True,
            bold=bold,
        )
    return c.svg()


def timeline(cluster: Cluster) -> str:
    """Four lanes: two messages arrive, one is waited for in vain."""
    run = cluster.run(leave_early, 4)
    assert run.outcome == "deadlock"
    return draw_timeline(run, title="Four ranks in an all_reduce that hangs")


def figures() -> dict[str, str]:
    """File name → picture."""
    with Cluster() as cluster:
        return {
            "hang.svg": hang(cluster),
            "report.svg": report(),
            "timeline.svg": timeline(cluster),
        }


if __name__ == "__main__":
    from figures import readme  # under its own name: ranks import what they run

    for path in write(readme.figures(), FOLDER):
        print(path.relative_to(ROOT))
