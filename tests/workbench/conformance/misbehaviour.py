"""Programs that end in every way a program can end, for the tests of the runner."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import sys
import threading
import time
from typing import Any

import torch

from distlab.comm import PeerLost
from distlab.runner import RankContext

HAS_A_DUTY = 1  # the rank that misbehaves, where one does


def hello(ctx: RankContext) -> list[Any]:
    return [ctx.rank, ctx.world_size]


def give_back(ctx: RankContext, *args: Any) -> tuple[Any, ...]:
    return args


def everything_plain(ctx: RankContext) -> Any:
    for number in range(3):
        ctx.report({"n": number, "x": torch.full((2,), float(number))})
    print(f"out of {ctx.rank}: äöü")
    print(f"err of {ctx.rank}", file=sys.stderr)
    return {"rank": ctx.rank, 3: (1, [None, True]), "~tensor": torch.ones(2)}


def random_numbers(ctx: RankContext) -> list[float]:
    return torch.rand(3).tolist()


def own_folder(ctx: RankContext) -> str:
    with open("left behind", "w") as file:
        file.write("x")
    return os.getcwd()


def one_raises(ctx: RankContext) -> None:
    if ctx.rank == HAS_A_DUTY:
        raise KeyError("momentum")  # THE LINE OF ONE RAISES
    ctx.comm.recv(torch.zeros(1), HAS_A_DUTY)


def all_raise(ctx: RankContext) -> None:
    raise ZeroDivisionError("all alike")


def raises_after_its_peer(ctx: RankContext) -> None:
    """Rank 0 fails second, and because of rank 1: the first in time is the cause."""
    if ctx.rank == HAS_A_DUTY:
        raise KeyError("first")
    time.sleep(0.1)
    raise RuntimeError("second")


def wraps_its_loss(ctx: RankContext) -> None:
    """Rank 1 dies; rank 0 notices and raises an error of its own."""
    ctx.comm.barrier()
    if ctx.rank == HAS_A_DUTY:
        time.sleep(0.05)
        os._exit(9)
    try:
        ctx.comm.recv(torch.zeros(1), HAS_A_DUTY)
    except PeerLost:
        raise RuntimeError("the optimiser lost its state") from None


def cannot_say_why(ctx: RankContext) -> None:
    class Silent(Exception):  # noqa: N818
        def __str__(self) -> str:
            raise ValueError("no words")

    raise Silent


def _once_rank_0_is_connected(ctx: RankContext) -> None:
    """Let rank 0 connect first, so that a death fails a call, not the setup."""
    if ctx.rank == HAS_A_DUTY:
        ctx.comm.recv(torch.zeros(1), 0)
    elif ctx.rank == 0:
        ctx.comm.send(torch.zeros(1), HAS_A_DUTY)


def leaves(ctx: RankContext, status: int) -> None:
    _once_rank_0_is_connected(ctx)
    if ctx.rank == HAS_A_DUTY:
        print("PASSED: all tests")
        os._exit(status)
    ctx.comm.recv(torch.zeros(1), HAS_A_DUTY)


def exits_politely(ctx: RankContext) -> None:
    if ctx.rank == HAS_A_DUTY:
        sys.exit(0)


def kills_itself(ctx: RankContext, how: str) -> None:
    _once_rank_0_is_connected(ctx)
    if ctx.rank == HAS_A_DUTY:
        os.kill(os.getpid(), getattr(signal, how))
    ctx.comm.recv(torch.zeros(1), HAS_A_DUTY)


def leaves_a_child_and_dies(ctx: RankContext) -> None:
    """The child keeps the rank's line to the parent open."""
    _once_rank_0_is_connected(ctx)
    if ctx.rank == HAS_A_DUTY:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.comm.recv(torch.zeros(1), HAS_A_DUTY)


def forks_and_forgets(ctx: RankContext) -> str:
    """The child returns from the program too; it is not the rank."""
    return "child" if os.fork() == 0 else "rank"


def too_small_a_box(ctx: RankContext) -> None:
    if ctx.rank == 0:
        ctx.comm.send(torch.zeros(8), 1)
    else:
        ctx.comm.recv(torch.zeros(4), 0)


def second_box_too_small(ctx: RankContext) -> None:
    """The first message fits: which one did not is known by counting."""
    if ctx.rank == 0:
        ctx.comm.send(torch.zeros(4), 1)
        ctx.comm.send(torch.zeros(2, 4), 1)
    else:
        ctx.comm.recv(torch.zeros(4), 0)
        ctx.comm.recv(torch.zeros(4), 0)


def reduces_unlike_dtypes(ctx: RankContext) -> None:
    dtype = torch.float32 if ctx.rank == 0 else torch.float64
    ctx.comm.all_reduce(torch.zeros(4))
    ctx.comm.all_reduce(torch.zeros(4, dtype=dtype))


def broadcasts_unlike_sizes(ctx: RankContext) -> None:
    ctx.comm.broadcast(torch.zeros(8 if ctx.rank == 0 else 4), 0)


def eats_memory(ctx: RankContext) -> float:
    if ctx.rank == HAS_A_DUTY:
        return float(torch.ones(20_000_000_000 // 4)[0])
    return 1.0


def loops(ctx: RankContext) -> None:
    if ctx.rank == HAS_A_DUTY:
        while True:
            pass  # THE LINE OF THE LOOP
    ctx.comm.recv(torch.zeros(1), HAS_A_DUTY)


def crashes(ctx: RankContext) -> None:
    ctx.comm.barrier()
    if ctx.rank == HAS_A_DUTY:
        faulthandler._sigsegv()  # type: ignore[attr-defined]
    ctx.comm.barrier()


def crashes_after_a_pause(ctx: RankContext) -> None:
    """Rank 0 crashes, after the others have run."""
    if ctx.rank == 0:
        ctx.comm.recv(torch.zeros(1), HAS_A_DUTY)
        faulthandler._sigsegv()  # type: ignore[attr-defined]
    if ctx.rank == HAS_A_DUTY:
        ctx.comm.send(torch.zeros(1), 0)
    ctx.comm.barrier()


def ring_of_sends(ctx: RankContext) -> None:
    box = torch.zeros(8)
    ctx.comm.send(box, (ctx.rank + 1) % ctx.world_size)  # THE LINE OF THE SEND
    ctx.comm.recv(box, (ctx.rank - 1) % ctx.world_size)


def skips_the_barrier(ctx: RankContext) -> None:
    if ctx.rank != HAS_A_DUTY:
        ctx.comm.barrier()


def sleeps_first(ctx: RankContext, seconds: float) -> float:
    if ctx.rank == HAS_A_DUTY:
        time.sleep(seconds)
    box = torch.ones(1)
    ctx.comm.all_reduce(box)
    if ctx.rank == 0:
        ctx.comm.send(box, 1)
    else:
        time.sleep(seconds)
        ctx.comm.recv(box, 0)
    return float(box)


def waits_for_its_limit(ctx: RankContext) -> str:
    """Both wait for nothing, but rank 0 gives up by itself after 0.4 s."""
    if ctx.rank == HAS_A_DUTY:
        with contextlib.suppress(PeerLost):
            ctx.comm.recv(torch.zeros(1), 0)
        return "was let go"
    try:
        ctx.comm.recv(torch.zeros(1), 1, timeout_s=0.4)
    except PeerLost as error:
        return f"lost {error.peer}"
    return "got something"


def receives_in_a_thread(ctx: RankContext) -> float:
    """Both main threads send first; rank 0's other thread comes to the rescue."""
    comm, box = ctx.comm, torch.zeros(1)
    if ctx.rank == 0:

        def later() -> None:
            time.sleep(0.4)
            comm.recv(box, 1, tag=3)

        helper = threading.Thread(target=later)
        helper.start()
        comm.send(torch.ones(1), 1)
        helper.join()
    else:
        comm.send(torch.ones(1), 0, tag=3)
        comm.recv(box, 0)
    return float(box)


def chatty_threads(ctx: RankContext) -> int:
    """Threads that all talk to the parent at once: no line may be torn."""
    text = "x" * 100_000

    def talk() -> None:
        for number in range(5):
            ctx.report([number, text])

    threads = [threading.Thread(target=talk) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(text)


def slow_broadcast(ctx: RankContext) -> str:
    """Rank 2 joins a broadcast only when rank 1 is through with it, and it is large."""
    comm, box = ctx.comm, torch.zeros(60_000_000)
    if ctx.rank == 2:
        comm.recv(torch.zeros(1), 1)
    comm.broadcast(box, 0)
    if ctx.rank == 1:
        comm.send(torch.zeros(1), 2)
    return "through"


def groups_of_different_ranks(ctx: RankContext) -> float:
    """Rank 1 joins its first group as rank 0 joins its second; then one is late."""
    ctx.comm.new_group([0, 2])
    pair = ctx.comm.new_group([0, 1])
    total = torch.zeros(1)
    if pair is not None:
        for number in range(2000):
            total += number
            pair.all_reduce(total)
            total /= 2
    return float(total)


def daemonises(ctx: RankContext) -> int:
    """A grandchild in a session of its own, which nobody waits for."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(120)
            os._exit(0)
        os.write(write, str(child).encode())
        os._exit(0)
    return int(os.read(read, 20))


def floods(ctx: RankContext, lines: int) -> str:
    for _ in range(lines):
        print("ä" * 1000)
    return "done"


def floods_for_ever(ctx: RankContext) -> None:
    while True:
        print("no end " * 100)


def babbles_in_calls(ctx: RankContext) -> int:
    """More calls than a journal keeps."""
    for _ in range(300):
        ctx.comm.barrier()
    return ctx.rank


def closes_stdout(ctx: RankContext) -> str:
    print("before")
    sys.stdout.close()
    sys.stderr = None
    return "still here"


def writes_on_our_line(ctx: RankContext) -> str:
    """Garbage into every socket of this process, the one to the parent included."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(entry) > 2 and "socket" in os.readlink(f"/proc/self/fd/{entry}"):
                os.write(int(entry), b'{"k": \n[1]\n\xff\xfe\n')
    return "unheard"


def result_that_cannot_travel(ctx: RankContext) -> Any:
    return {"seen": {ctx.rank}}


def imports(ctx: RankContext, folder: str, module: str) -> None:
    sys.path.insert(0, folder)
    importlib.import_module(module)


def is_alone(ctx: RankContext) -> float:
    """For two clusters at once: sums that would show a message of the other one."""
    total = torch.zeros(1)
    for number in range(100):
        box = torch.tensor([float(number)])
        ctx.comm.all_reduce(box)
        total += box
    return float(total)


def sleeps_long(ctx: RankContext) -> None:
    ctx.report("sleeping")
    time.sleep(60)
