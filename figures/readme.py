"""The two pictures of the README, from runs made here; `python -m figures.readme`.

Nothing in them is typed by hand: the autopsy is the grader's verdict on a wrong
`pass_around`, the timeline is the journal of four ranks of which one leaves early.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from pathlib import Path

import torch

from distlab.comm import Event
from distlab.curriculum import load, load_curriculum
from distlab.grading.grade import Grader
from distlab.grading.report import lines_of
from distlab.runner import Cluster, RankContext, Run
from distlab.runner.autopsy import explain
from figures.draw import BLUE, GREEN, GREY, INK, PALE, RED, Canvas, write

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "figures"
COURSE = ("curriculum.toml", "solutions", "phase1_data_parallel")

_HOLE = re.compile(
    r" *# TODO\(collectives\.pass_around\)\n(?: *#.*\n)* *raise NotImplementedError.*\n"
)
_WRONG = """\
    n = comm.world_size
    comm.send(outgoing, (comm.rank + 1) % n)
    comm.recv(incoming, (comm.rank - 1) % n)
"""
_INKS = {"pass": GREEN, "fail": RED, "dim": GREY, "rule": BLUE, "plain": INK}


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
    c = Canvas(
        "hang",
        760,
        46 + 22 * len(lines),
        title="distlab check on a ring of sends",
        desc=" ".join(" ".join(text.split()) for _, text in lines),
    )
    c.text(20, 26, "$ distlab check 1.2", size=13, anchor="start", mono=True)
    for row, (style, text) in enumerate(lines):
        indent = len(text) - len(text.lstrip())
        spaced = text.strip().replace(" ", "\u00a0")  # SVG folds runs of spaces
        bold = style == "fail"
        c.text(
            20 + 8 * indent,
            52 + 22 * row,
            spaced,
            size=13,
            colour=_INKS[style],
            anchor="start",
            mono=True,
            bold=bold,
        )
    return c.svg()


def timeline(cluster: Cluster) -> str:
    """Four lanes: two messages arrive, one is waited for in vain."""
    run = cluster.run(leave_early, 4)
    assert run.outcome == "deadlock"
    messages, waiting = _schedule(run)
    end = 1 + max(slot for slot, _, _ in messages)
    c = Canvas(
        "timeline",
        760,
        320,
        title="Four ranks in an all_reduce that hangs",
        desc=f"Lanes of ranks 0 to 3 over time. {explain(run)}.",
    )

    def at(slot: float) -> float:
        return 150 + 150 * slot

    for record in run.ranks:
        y = 60 + 60 * record.rank
        c.text(70, y + 5, f"rank {record.rank}", size=15, bold=True)
        c.rect(120, y - 9, 600, 18, fill=PALE, stroke=GREY)
        if record.rank in waiting:
            begun, call = waiting[record.rank]
            c.hatch(at(begun), y - 9, 720 - at(begun), 18, colour=RED)
            c.text(720, y - 16, f"waits in {call}", size=12, colour=RED, anchor="end")
        if record.status == "finished" and not record.calls():
            c.text(720, y + 28, "finished: made no call", size=12, anchor="end")
    for slot, src, dst in messages:
        y, end_y = 60 + 60 * src, 60 + 60 * dst
        c.arrow(at(slot), y - 9, at(slot + 0.6), end_y + 9, colour=GREEN, thick=3)
    for rank, peers in run.waits_for.items():
        for peer in peers:
            if run.ranks[peer].status == "finished":
                x, y, end_y = at(end + 0.3), 60 + 60 * peer, 60 + 60 * rank
                c.arrow(x, y - 9, x + 70, end_y + 9, colour=RED, thick=3, dash="7 6")
                c.text(x + 24, y - 26, "never sent", colour=RED, anchor="start")
    c.text(380, 302, explain(run), size=14, colour=RED, bold=True)
    return c.svg()


def _schedule(
    run: Run,
) -> tuple[list[tuple[int, int, int]], dict[int, tuple[int, str]]]:
    """Messages as (slot, src, dst) in logical time, and who waits from which slot on.

    A send and its receive meet in one slot, the first that both ranks have free.
    """
    queues = {record.rank: list(record.calls()) for record in run.ranks}
    free = dict.fromkeys(queues, 0)
    messages = []
    while pair := _meeting(queues):
        src, dst = pair
        slot = max(free[src], free[dst])
        messages.append((slot, src, dst))
        for rank in pair:
            queues[rank].pop(0)
            free[rank] = slot + 1
    waiting = {
        rank: (free[rank], _words(queue[0])) for rank, queue in queues.items() if queue
    }
    return messages, waiting


def _meeting(queues: dict[int, list[Event]]) -> tuple[int, int] | None:
    for rank, queue in queues.items():
        if queue and queue[0]["op"] == "send":
            peer = queues[queue[0]["dst"]]
            if peer and peer[0]["op"] == "recv" and peer[0]["src"] == rank:
                return rank, queue[0]["dst"]
    return None


def _words(call: Event) -> str:
    peer = f"← {call['src']}" if call["op"] == "recv" else f"→ {call['dst']}"
    return f"{call['op']} {peer}"


def figures() -> dict[str, str]:
    """File name → picture."""
    with Cluster() as cluster:
        return {"hang.svg": hang(cluster), "timeline.svg": timeline(cluster)}


if __name__ == "__main__":
    from figures import readme  # under its own name: ranks import what they run

    for path in write(readme.figures(), FOLDER):
        print(path.relative_to(ROOT))
