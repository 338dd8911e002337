"""Record the runs of 4.6: three ranks train on gloo, and something happens to one.

    python -m benchmarks.record_faults [--only hang] [--out FOLDER]

Each rank says what it does on its standard output, and a thread of it sends a heartbeat
every 50 ms. The messages are kept as they were sent, with the times of one clock. What
happens to the rank is real: SIGSTOP, SIGKILL, a loop without an end, files that are
written and synced, an import of 800 modules in the first step of a new process.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from typing import NamedTuple

from distlab.given.recovering import RUNS

RANKS, FAULT_STEP, BEAT_S = 3, 16, 0.05
LONG = 20  # times the usual step: so long it is recorded, and so long a rank saves
BATCH, WIDTH, NUM_LAYERS = 1024, 256, 3
Message = tuple[float, int, str, int]


class Setting(NamedTuple):
    """What happens to which rank, once it has completed FAULT_STEP."""

    title: str
    rank: int
    fault: str
    in_what: str = ""  # a signal is sent when the rank does this
    is_replaced: bool = False


SETTINGS = {
    "stopped": Setting(
        "rank 1 gets SIGSTOP while it computes", 1, "SIGSTOP", "compute"
    ),
    "stopped_waiting": Setting(
        "rank 2 gets SIGSTOP while it waits in a collective", 2, "SIGSTOP", "wait"
    ),
    "hang": Setting("rank 0's trainer hangs, its heartbeat goes on", 0, "hang"),
    "killed": Setting("rank 0 gets SIGKILL", 0, "SIGKILL", "compute"),
    "slow": Setting("rank 2 computes eight times as long", 2, "slow"),
    "saves": Setting("rank 0 saves for a long time, the others wait", 0, "save"),
    "replaced": Setting(
        "rank 1 gets SIGKILL; the first step of a new process takes long",
        1,
        "SIGKILL",
        "compute",
        is_replaced=True,
    ),
}


# ── a rank ──────────────────────────────────────────────────────────────────────────


def say(what: str, number: int = 0) -> None:
    """Send one message: a line that the pipe takes as a whole."""
    os.write(1, f"{time.monotonic():.4f} {what} {number}\n".encode())


def beat() -> None:
    """The heartbeat thread: it knows nothing of the trainer."""
    while True:
        say("beat")
        time.sleep(BEAT_S)


def train(rank: int, fault: str, store: str, generation: int) -> None:
    """One rank's program; it trains until it is killed."""
    say("started")
    threading.Thread(target=beat, daemon=True).start()
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)]
    model = nn.Sequential(*layers)
    weights = list(model.parameters())
    inputs = torch.randn(BATCH, WIDTH)

    def join() -> None:
        say("wait")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}{generation}",
            rank=rank,
            world_size=RANKS,
        )

    join()
    number = (generation - 1) * FAULT_STEP
    begin_s = time.monotonic()
    is_first = True
    while True:
        number += 1
        say("compute")
        if is_first and generation > 1:
            import torch._dynamo
        is_first = False
        is_faulty = number > FAULT_STEP
        for _ in range(8 if is_faulty and fault == "slow" else 1):
            model(inputs).square().mean().backward()
        while is_faulty and fault == "hang":
            pass
        try:
            for weight in weights:
                assert weight.grad is not None
                say("wait")
                dist.all_reduce(weight.grad)
                say("compute")
        except RuntimeError:  # another rank is gone
            say("wait")
            dist.destroy_process_group()
            generation += 1
            number -= 1
            join()
            continue
        with torch.no_grad():
            for weight in weights:
                assert weight.grad is not None
                weight.sub_(weight.grad, alpha=0.01 / RANKS)
                weight.grad = None
        say("step", number)
        if number == FAULT_STEP and fault == "save":
            save(LONG * (time.monotonic() - begin_s) / number)


def save(seconds: float) -> None:
    """Write and sync a file, again and again."""
    say("save")
    until_s = time.monotonic() + seconds
    with tempfile.TemporaryFile() as file:
        while time.monotonic() < until_s:
            file.seek(0)
            file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())


# ── the ranks of one run, and what is done to them ──────────────────────────────────


class Ranks:
    """The processes of a run, and all that they have said."""

    def __init__(self, name: str, store: str) -> None:
        self.name, self.store = name, store
        self.messages: list[Message] = []
        self.news: queue.Queue[Message] = queue.Queue()
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self.all: list[subprocess.Popen[str]] = []

    def start(self, rank: int, generation: int = 1) -> None:
        """Start the process of a rank."""
        command = [sys.executable, "-m", "benchmarks.record_faults", "--as", self.name]
        command += ["--store", self.store, "--rank", str(rank)]
        command += ["--generation", str(generation)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.processes[rank] = process
        self.all.append(process)
        threading.Thread(target=self._read, args=(rank, process)).start()

    def _read(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            time_s, what, number = line.split()
            self.news.put((float(time_s), rank, what, int(number)))
        self.news.put((time.monotonic(), rank, "ended", process.wait()))

    def until(self, rank: int, what: str, number: int = 0) -> None:
        """Read messages until this one of this rank."""
        while True:
            message = self.news.get(timeout=60)
            self.messages.append(message)
            if message[1:3] == (rank, what) and message[3] >= number:
                return

    def during(self, seconds: float) -> None:
        """Read messages for some time."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                self.messages.append(self.news.get(timeout=left_s))
            except queue.Empty:
                return

    def mean_step_s(self, rank: int) -> float:
        """How long a step took so far, without the first one."""
        times = [m[0] for m in self.messages if m[1:3] == (rank, "step")]
        return (times[-1] - times[0]) / (len(times) - 1)

    def end(self) -> None:
        """Kill all processes."""
        for process in self.all:
            process.kill()
            process.wait()


def record(name: str, folder: Path) -> Path:
    """Run a setting; the file with its messages."""
    setting = SETTINGS[name]
    with tempfile.TemporaryDirectory() as temporary:
        ranks = Ranks(name, f"{temporary}/store")
        try:
            for rank in range(RANKS):
                ranks.start(rank)
            ranks.until(setting.rank, "step", FAULT_STEP)
            if setting.in_what:
                ranks.until(setting.rank, setting.in_what)
            fault_s = time.monotonic()
            long_s = LONG * ranks.mean_step_s(setting.rank)
            if setting.fault.startswith("SIG"):
                number = SIGSTOP if setting.fault == "SIGSTOP" else SIGKILL
                ranks.processes[setting.rank].send_signal(number)
            if setting.is_replaced:
                ranks.until(setting.rank, "ended", -SIGKILL)
                ranks.start(setting.rank, generation=2)
                ranks.until(setting.rank, "step", FAULT_STEP + 8)
            else:
                ranks.during(long_s)
        finally:
            ranks.end()
    return write(folder / f"{name}.json", setting, ranks.messages, fault_s)


def write(
    path: Path, setting: Setting, messages: list[Message], fault_s: float
) -> Path:
    """The messages in order, from time 0."""
    messages.sort()
    zero_s = messages[0][0]
    rows = [[round(m[0] - zero_s, 4), *m[1:]] for m in messages]
    head = {
        "title": setting.title,
        "faults": [[round(fault_s - zero_s, 4), setting.rank, setting.fault]],
    }
    lines = ",\n".join(json.dumps(row) for row in rows)
    text = f'{json.dumps(head)[:-1]}, "messages": [\n{lines}\n]}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")
    return path


def main() -> None:
    """Record all settings, or be a rank of one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", default=str(RUNS))
    parser.add_argument("--only", choices=SETTINGS)
    for hidden in ("--as", "--store"):
        parser.add_argument(hidden, dest=hidden[2:5], help=argparse.SUPPRESS)
    for hidden in ("--rank", "--generation"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        fault = SETTINGS[vars(given)["as"]]
        own = fault.fault if given.rank == fault.rank else ""
        train(given.rank, own, given.sto, given.generation)
        return
    for name in [given.only] if given.only else SETTINGS:
        print(record(name, Path(given.out)))


if __name__ == "__main__":
    main()
