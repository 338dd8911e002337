"""Train on four ranks, let one thing go wrong, and return reports and events.

Each rank is a process that has its own data worker (`distlab.data`), uses gloo, trains
the course's convolutional network and saves a shard of a checkpoint every fifth step.
The fault is real: SIGKILL, SIGSTOP, a shard that is cut short, or a nan in a gradient.

    played(fault, data) ─▶ reports, events     the arguments of drill.incident
    draw(seed) ─▶ fault                        for `distlab drill`
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import random
import re
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

from distlab.data.images import open_images
from distlab.data.loader import ImageLoader
from distlab.data.transforms import TrainTransform, normalized
from distlab.given import drill as given
from distlab.given.monitoring import checksum
from distlab.models.convnet import make_convnet
from distlab.processes.tree import die_with_parent

RANKS, STEPS, SAVE_EVERY = 4, 20, 5
TIMEOUT_S, SLOWER_S, PAUSE_S, LOOK_S = 12.0, 1.0, 2.0, 0.05
TRIES = 3  # on a busy machine ranks may time out before anything is injected
PAUSE = "pause"  # one long step: nothing is wrong


class InjectedFault(NamedTuple):
    """The fault to inject, its rank and step, and possibly a shard that is torn."""

    what: str
    rank: int = -1
    step: int = -1
    torn: tuple[int, int] = (-1, -1)  # rank, step of the checkpoint

    @property
    def cause(self) -> given.Cause:
        """Return the correct diagnosis of the run; a pause counts as nothing."""
        if self.what in (given.NOTHING, PAUSE):
            return given.Cause(given.NOTHING)
        return given.Cause(self.what, self.rank, self.step)


def draw(seed: int) -> InjectedFault:
    """Draw a fault of any kind on any rank; some kills also have a torn checkpoint."""
    chance = random.Random(seed)
    what = chance.choice([*given.ACTIONS, PAUSE])
    rank, step = chance.randrange(RANKS), chance.randrange(6, 15)
    if what == given.NOTHING:
        return InjectedFault(what)
    if what == given.TORN:
        step = chance.choice((10, 15))
        return InjectedFault(what, rank, step, torn=(rank, step))
    if what == given.KILLED and chance.random() < 0.5:
        other = (rank + 1 + chance.randrange(RANKS - 1)) % RANKS
        return InjectedFault(what, rank, max(step, 11), torn=(other, 10))
    return InjectedFault(what, rank, step)


def last_step(fault: InjectedFault) -> int:
    """Return the last step of the ranks, two after a checkpoint that will be torn."""
    return fault.step + 2 if fault.what == given.TORN else STEPS


class Ledger:
    """A rank's lines, each written at once so that it survives a SIGKILL."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.file = open(folder / f"rank_{rank}.jsonl", "a", buffering=1)  # noqa: SIM115
        self.rank = rank

    def report(self, *values: float) -> None:
        """Report a completed step."""
        self.file.write(json.dumps(["report", time.monotonic(), *values]) + "\n")

    def event(self, kind: str, step: int, text: str = "") -> None:
        """Report anything else."""
        row = ["event", time.monotonic(), kind, self.rank, step, text]
        self.file.write(json.dumps(row) + "\n")


def train(rank: int, fault: InjectedFault, folder: Path, data: Path) -> None:
    """Run one rank; its exit code is 1 if anything was raised."""
    die_with_parent()
    log, step = Ledger(folder, rank), [0]
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=RANKS,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        _steps(rank, fault, folder, data, log, step)
    except RuntimeError as error:
        kind = given.RAISED if "DataLoader worker" in str(error) else given.LOST
        log.event(kind, step[0], _plain(str(error)))
        os._exit(1)  # destroying the group would wait for the peers
    os._exit(0)


def _steps(
    rank: int,
    fault: InjectedFault,
    folder: Path,
    data: Path,
    log: Ledger,
    at: list[int],
) -> None:
    transform = TrainTransform(size=28, channels=1, area=(0.6, 1.0), flip=0.0)
    images = open_images(data, "train", transform)
    loader = ImageLoader(images, 16 * RANKS, rank, RANKS, num_workers=1, max_restarts=0)
    model = make_convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = iter(loader)
    for step in range(1, last_step(fault) + 1):
        at[0] = step
        is_hit = rank == fault.rank and step == fault.step
        begin_s = time.monotonic()
        if is_hit and fault.what == given.DATA_WORKER:
            worker = loader._loader._iterator._workers[0]  # type: ignore[union-attr]
            os.kill(worker.pid, signal.SIGKILL)
            time.sleep(PAUSE_S)  # torch raises here
        batch = next(batches)
        inputs = normalized(batch.images, (0.5,), (0.5,))
        loss = functional.cross_entropy(model(inputs), batch.targets)
        optimizer.zero_grad()
        loss.backward()
        _inject(fault, rank, step, model)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        num_nonfinite = int((~torch.isfinite(flat)).sum())
        own_s = time.monotonic() - begin_s
        log.event(given.ENTERED, step)
        dist.all_reduce(flat)
        offset = 0
        for gradient in gradients:
            part = flat[offset : offset + gradient.numel()]
            gradient.copy_((part / RANKS).view_as(gradient))
            offset += gradient.numel()
        optimizer.step()
        if is_hit and fault.what == given.DESYNC:
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] += 1e-3
        _save(model, folder, rank, step)
        crc = checksum(p for p in model.parameters())
        log.report(rank, step, own_s, loss.item(), num_nonfinite, crc)


def _inject(fault: InjectedFault, rank: int, step: int, model: torch.nn.Module) -> None:
    if rank != fault.rank:
        return
    if fault.what == given.SLOW and step >= fault.step:
        time.sleep(SLOWER_S)
    if step != fault.step:
        return
    if fault.what == given.KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.what == given.FROZEN:
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault.what == PAUSE:
        time.sleep(PAUSE_S)
    if fault.what == given.NAN:
        gradient = next(model.parameters()).grad
        assert gradient is not None
        gradient.view(-1)[:3] = math.nan


def _save(model: torch.nn.Module, folder: Path, rank: int, step: int) -> None:
    """Save this rank's shard and its checksum after every fifth step."""
    if step % SAVE_EVERY:
        return
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    data = values.chunk(RANKS)[rank].numpy().tobytes()
    path = folder / f"step_{step}_rank_{rank}"
    path.write_bytes(data)
    path.with_suffix(".sha256").write_text(hashlib.sha256(data).hexdigest())


# ── the agent ───────────────────────────────────────────────────────────────────────


def watch(fault: InjectedFault, folder: Path, data: Path) -> list[Any]:
    """Start the ranks, wait for them to end, and return the agent's events."""
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=train, args=(r, fault, folder, data))
        for r in range(RANKS)
    ]
    for process in ranks:
        process.start()
    events, open_ranks, until_s = [], set(range(RANKS)), time.monotonic() + 300
    idle_s = math.inf
    while open_ranks and time.monotonic() < min(until_s, idle_s):
        time.sleep(LOOK_S)
        for rank in sorted(open_ranks):
            code = ranks[rank].exitcode
            if code is None:
                continue
            open_ranks.remove(rank)
            said = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            events.append([time.monotonic(), given.ENDED, rank, -1, said])
            idle_s = time.monotonic() + 3 * TIMEOUT_S
    if fault.what == given.TORN:
        events.append([time.monotonic(), given.STOPPED, -1, last_step(fault), ""])
    for rank in open_ranks:  # the frozen one
        ranks[rank].kill()
    for process in ranks:
        process.join()
    return events + _checkpoints(fault, folder)


def _checkpoints(fault: InjectedFault, folder: Path) -> list[Any]:
    """Return when each checkpoint was complete, then read all shards like a restart."""
    events: list[Any] = []
    # st_mtime is of the time of day; reports are on the clock that goes forward only.
    shift_s = time.time() - time.monotonic()
    for step in range(SAVE_EVERY, STEPS + 1, SAVE_EVERY):
        paths = [folder / f"step_{step}_rank_{rank}" for rank in range(RANKS)]
        if not all(path.with_suffix(".sha256").is_file() for path in paths):
            continue
        saved_s = max(p.with_suffix(".sha256").stat().st_mtime for p in paths) - shift_s
        events.append([saved_s, given.SAVED, -1, step, ""])
        if fault.torn[1] == step:
            os.truncate(paths[fault.torn[0]], 1000)
        for rank, path in enumerate(paths):
            expected = path.with_suffix(".sha256").read_text()
            if hashlib.sha256(path.read_bytes()).hexdigest() != expected:
                said = f"{path.name}: its SHA-256 is another"
                events.append([time.monotonic(), given.REFUSED, rank, step, said])
    return events


# ── what it was ─────────────────────────────────────────────────────────────────────


def played(fault: InjectedFault, data: Path) -> tuple[list[Any], list[Any]]:
    """Return the rows of reports and events from time 0; `data` is an image folder.

    Raises:
        TimeoutError: the ranks failed before the fault, several times.
    """
    for _ in range(TRIES):
        reports, events = _recorded(fault, data)
        if _came_so_far(fault, reports):
            return reports, events
    raise TimeoutError(
        f"{TRIES} times the ranks failed before anything was injected: the machine is "
        "too busy for four ranks"
    )


def _recorded(fault: InjectedFault, data: Path) -> tuple[list[Any], list[Any]]:
    with tempfile.TemporaryDirectory(prefix="distlab-incident-") as temporary:
        folder = Path(temporary)
        seen = [["event", *event] for event in watch(fault, folder, data)]
        for path in sorted(folder.glob("rank_*.jsonl")):
            own = [json.loads(line) for line in path.read_text().splitlines()]
            entered = [row for row in own if row[2] == given.ENTERED]
            seen += [row for row in own if row[2] != given.ENTERED] + entered[-1:]
    seen.sort(key=lambda row: float(row[1]))
    begin_s = seen[0][1]
    reports = [
        [rank, step, round(time_s - begin_s, 4), round(own_s, 4), loss, bad, crc]
        for _, time_s, rank, step, own_s, loss, bad, crc in (
            row for row in seen if row[0] == "report"
        )
    ]
    events = [
        [round(row[1] - begin_s, 4), *row[2:]] for row in seen if row[0] == "event"
    ]
    return reports, events


def _came_so_far(fault: InjectedFault, reports: list[Any]) -> bool:
    """Return True if all ranks completed every step that the fault allows."""
    is_over = fault.what in (given.KILLED, given.FROZEN, given.DATA_WORKER)
    last = fault.step - 1 if is_over else last_step(fault)
    return bool(sum(row[1] <= last for row in reports) == RANKS * last)


def _plain(error: str) -> str:
    """Return an error's first line without addresses, process numbers and paths."""
    line = error.splitlines()[0]
    line = re.sub(r"\[[^]]*\.(cc|cpp|h):\d+\]\s*", "", line)
    line = re.sub(r"\[[\d.:a-f]+\]:\d+|pid \d+", "…", line)
    return line[:120]
