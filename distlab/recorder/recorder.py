"""Post where this rank waits, once it stands still: a thread in each rank.

How this works. A few times a second the thread looks at the frames of all others. If
nothing has moved since the last look, every thread that could make a call waits in one,
and the system says that they sleep, then the rank stands still. Only then the thread
reads torch's flight recorder and puts a post into the job's store. As soon as the rank
moves again, it says so. A judge elsewhere reads the posts of all ranks.

A rank that computes, sleeps, waits for a file or a DataLoader, or holds the GIL never
stands still in this sense. It sends a short post every few seconds, or none at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Any

from distlab.recorder import agreement
from distlab.recorder.frames import is_users, place_of, stack_of
from distlab.recorder.journal import BACKWARD, Act, Channel, Journal, Messages

LOOK_S = 0.1
LOOK_AT_MOVING_S = 0.8
"""A look costs a millisecond, which a training step would miss. So the longer a rank
has moved, the rarer we look at it, up to this pause."""
BEAT_S = 5.0
KEPT = 48  # newest calls in a post, besides those under way
FAILED = 1
_ENDING_S = 5.0
_TOGETHER_S = 1.0
_SHARING_S = 10.0
_PATIENCE_S = 20.0  # with a judge that may be gone
_LAST_LOOK_S, _LAST_WORD_S = 5.0, 1.5
_FAILED = {"state": "failed", "retired": False}  # in the flight recorder's terms
Judge = Callable[[Any, int], Callable[[], object]]
"""From the job's store and number of ranks to a function that looks at the posts."""
_WAITING = ("autograd/", "distributed/", "nn/parallel/", "_ops.py", "futures/")
"""Files of torch from which C++ code is called that waits for other ranks."""
_JOINING = ("_shutdown", "join", "_wait_for_tstate_lock")


def prefix(num_restarts: int | None = None) -> str:
    """Return how the keys of one start of the job begin; this rank's by default."""
    if num_restarts is None:
        num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return f"distlab/{num_restarts}/"


class Recorder:
    """Looks at this process, and posts what it sees."""

    def __init__(
        self,
        journal: Journal,
        rank: int,
        world_size: int,
        judge: Judge | None = None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._make_judge = judge
        self._look_at_all: Callable[[], object] | None = None
        self.error = ""
        self._journal, self._store = journal, None
        self._is_over = False
        self._is_due = threading.Event()  # the next look must not wait
        self._has_posted = threading.Event()  # that the rank stands still
        self._thread: threading.Thread | None = None
        self._last: object = None  # the signature of the last look
        self._posted: object = None  # that of the last post of a rank that stood still
        self._ticks: dict[int, tuple[str, str]] = {}
        self._moved_s = self._beat_s = time.monotonic()
        self._verdict = threading.Event()
        self._has_left = False  # what the newest post says
        self._pause_s = LOOK_S
        torch = os.path.dirname(sys.modules["torch"].__file__ or "")
        self._waiting = tuple(
            os.path.join(torch, *path.split("/")) for path in _WAITING
        )

    def start(self) -> None:
        """Look from a thread of our own."""
        run = self._run
        self._thread = threading.Thread(target=run, name="distlab", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Look until the process ends or its store is gone."""
        self._journal.exempt.add(threading.get_ident())
        with contextlib.suppress(Exception):  # the store's: then nobody reads us
            while True:
                self._is_due.wait(self._pause_s)
                self._is_due.clear()
                if self._is_over:
                    return
                if self._store is None and self._journal.has_begun:
                    self._store = _connected()
                if self._store is not None and self._journal.active:
                    self._look()

    def share(self) -> None:
        """Agree with this machine's ranks on a shared file, once they have met."""
        import torch.distributed as dist

        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        first = self.rank - local_rank
        if num_local < 2 or self._journal.compare is not None:
            return
        key = f"{prefix()}shared/{first}"
        store = dist.distributed_c10d._get_default_store()
        self._journal.exempt.add(threading.get_ident())  # no call of the script's
        try:
            if local_rank == 0:
                store.set(key, agreement.create(num_local))
            store.wait([key], timedelta(seconds=_SHARING_S))
            path = store.get(key).decode()
            shared = agreement.Agreement(
                path, self.rank, range(first, first + num_local)
            )
            if store.add(f"{key}/open", 1) == num_local:
                os.unlink(path)
        except Exception:  # the ranks go on uncompared
            return
        finally:
            self._journal.exempt.discard(threading.get_ident())
        self._journal.compare = self._compared(shared)

    def _compared(self, shared: agreement.Agreement) -> Any:
        def compare(act: Act) -> None:
            shared.compare(act)
            if act.others:
                with self._seated(act):
                    self._verdict.wait(_PATIENCE_S)

        return compare

    @contextlib.contextmanager
    def _seated(self, act: Act) -> Iterator[None]:
        """Stay in a call for the verdict, with which this process usually ends."""
        seats = self._journal.sit_down(act)
        try:
            yield
        finally:
            seats.remove(act)

    def _be_looked_at(self) -> None:
        """Wait for a look: they may be rare by now, and a busy machine delays them."""
        self._has_posted.clear()
        self._pause_s = LOOK_S
        self._is_due.set()
        looks = self._thread is not None and self._thread.is_alive()
        if looks and self._store is not None:
            self._has_posted.wait(_LAST_LOOK_S)

    def fail(self, error: BaseException) -> None:
        """This rank is about to end with an error that nobody has caught.

        If a call has raised it, the rank stays in this call for a moment. A connection
        breaks when the other side has ended, so the judge can tell by which call.
        """
        text = f"{type(error).__name__}: {error}"
        self.error = text.partition("\n")[0][:300]
        # Ctrl-C isn't the call's own error.
        act = self._journal.raised_in(error) if isinstance(error, Exception) else None
        if act is not None:
            act.failed, act.done = True, False
            with self._seated(act):
                self._be_looked_at()
                self._verdict.wait(_LAST_WORD_S)

    def finish(self) -> None:
        """Post that this rank ends: called at the exit of the interpreter.

        We wait for our thread, because Python kills daemon threads in a way that C++
        code can't stand: https://docs.python.org/3/library/threading.html
        """
        self._is_over = True
        self._is_due.set()
        if self._thread is not None:
            self._thread.join(_ENDING_S)
        if not self._journal.active:
            return
        with contextlib.suppress(Exception):
            if self._store is None and self._journal.has_begun:  # a short script
                self._store = _connected()
            if self._store is not None:
                self._post("failed" if self.error else "ended", [])

    # ── a look ──────────────────────────────────────────────────────────────────────

    def _look(self) -> None:
        now_s = time.monotonic()
        threads = self._threads()
        signature = (self._journal.num_events, [(t["ident"], t["at"]) for t in threads])
        has_moved = signature != self._last
        longer_s = min(self._pause_s * 1.5, LOOK_AT_MOVING_S)
        self._pause_s = longer_s if has_moved else LOOK_S
        self._last = signature
        if has_moved:
            self._moved_s = now_s
            self._ticks.clear()
        if threads and not has_moved and self._all_wait(threads):
            if self._posted != signature:
                self._posted = signature
                self._post("still", threads)
                self._has_posted.set()
            self._hear()
        elif (
            self._posted is not None
            or now_s - self._beat_s > BEAT_S
            or self._has_left != self._journal.has_left
        ):
            self._posted, self._has_left = None, self._journal.has_left
            self._post("moves", threads)
        self._judge_if_due()

    def _threads(self) -> list[dict[str, Any]]:
        """The threads that could make a call, and what each waits for."""
        found = []
        own, main = threading.get_ident(), threading.main_thread().ident
        for ident, frame in sys._current_frames().items():
            if ident == own or ident in self._journal.exempt:
                continue
            seats = self._journal.seats.get(ident)
            could_call = ident == main or ident in self._journal.callers
            if not (seats or could_call or _has_users(frame)):
                continue
            if not seats and _joins(frame):
                continue  # it moves when another thread ends
            found.append(
                {
                    "ident": ident,
                    "at": (id(frame), frame.f_lasti),
                    "act": _outermost(seats) if seats else None,
                    "main": ident == main,
                    "frame": frame,
                }
            )
        return found

    def _all_wait(self, threads: list[dict[str, Any]]) -> bool:
        """Return True if each thread sleeps in a call, and say so in `threads`.

        A thread in backward(), or in C++ code that torch.distributed has called, waits
        for the calls that are under way if there are any. Elsewhere in torch, such as
        in torch.load, it may wait for a file.
        """
        for thread in threads:
            thread["sleeps"] = self._sleeps(thread["ident"])
        if not all(thread["sleeps"] for thread in threads):
            return False
        unknown = [thread for thread in threads if thread["act"] is None]
        for thread in unknown:
            if not thread["frame"].f_code.co_filename.startswith(self._waiting):
                return False
        if unknown and not _num_under_way():
            return False
        for thread in unknown:
            thread["act"] = Act("unfinished", "", place=place_of(thread["frame"]))
        return True

    def _sleeps(self, ident: int) -> bool:
        """Return True if the thread has used no processor time since the last look."""
        thread = threading._active.get(ident)  # type: ignore[attr-defined]
        native = getattr(thread, "native_id", None)
        if thread is threading.main_thread():
            native = os.getpid()  # after a fork, Python 3.11 says the parent's
        if native is None or not sys.platform.startswith("linux"):
            return True
        try:
            with open(f"/proc/self/task/{native}/stat", encoding="ascii") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return False
        ticks = (fields[11], fields[12])
        before, self._ticks[ident] = self._ticks.get(ident), ticks
        return fields[0] == "S" and ticks == before

    # ── the posts ───────────────────────────────────────────────────────────────────

    def _post(self, state: str, threads: list[dict[str, Any]]) -> None:
        self._beat_s = time.monotonic()
        journal = self._journal
        post: dict[str, Any] = {
            "rank": self.rank,
            "world_size": self.world_size,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "state": state,
            "error": self.error,
            "num_events": journal.num_events,
            "has_left": self._has_left,
            "posted_at_s": time.time(),
            "beat_s": BEAT_S,
            "moved_at_s": time.time() - (self._beat_s - self._moved_s),
        }
        if state != "moves" or self._has_left or self._beat_s - self._moved_s > BEAT_S:
            post |= {
                "dump": self._dump(),  # which numbers the calls
                "sends": _channels(journal.sends),
                "recvs": _channels(journal.recvs),
                "meetings": [_act(act) for act in list(journal.meetings)],
            }
        post["threads"] = [_thread(thread) for thread in threads]
        text = json.dumps(post)
        store: Any = self._store
        store.set(f"{prefix()}post/{self.rank}", text)
        store.add(f"{prefix()}posts", 1)

    def _dump(self) -> dict[str, Any]:
        """Torch's own record, with the lines and the members that it lacks."""
        entries = _flight_record()
        under_way = [e for e in entries[:-KEPT] if not _is_over(e)]
        entries = [e for e in [*under_way, *entries[-KEPT:]] if not e["is_p2p"]]
        acts = list(self._journal.calls)
        newest = None  # of the calls of a backward() that has failed
        for entry in entries:
            act = _act_of(entry, acts)
            if act is None:
                continue
            if act.kind == BACKWARD:
                newest = entry if act.failed else newest
            else:
                if act.failed:
                    entry |= _FAILED
                act.number, act.done = int(entry["collective_seq_id"]), _is_over(entry)
                entry |= {"op": act.op, "root": act.root, "reduce_op": act.reduce_op}
            if act.place:
                file, line = act.place
                entry["frames"] = [{"filename": file, "line": line, "name": ""}]
        if newest is not None:
            newest |= _FAILED
        with contextlib.suppress(Exception):  # torch's own table may have moved
            self._journal.learn_groups()
        groups = {
            name: {"ranks": json.dumps(list(ranks)), "desc": ""}
            for name, ranks in self._journal.groups.items()
        }
        return {"version": "2", "entries": entries, "pg_config": groups}

    def _hear(self) -> None:
        """While nothing moves: has the judge found what is wrong?"""
        store: Any = self._store
        key = f"{prefix()}verdict"
        if self._verdict.is_set() or not store.check([key]):
            return
        verdict = json.loads(store.get(key))
        if not verdict["ends"]:
            self._verdict.set()  # a call that was held back goes on
            return
        _write_error_file(verdict["sentence"])
        # Together: gloo would tell a rank that stays behind of a broken connection.
        heard, until_s = f"{key}/heard", time.monotonic() + _TOGETHER_S
        store.add(heard, 1)
        while store.add(heard, 0) < verdict["num_alive"] and time.monotonic() < until_s:
            time.sleep(0.01)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(FAILED)

    def _judge_if_due(self) -> None:
        """Without an agent, the first rank that has not ended judges."""
        if self._make_judge is None:
            return
        if self._look_at_all is None:
            if self.rank and not self._is_first():
                return
            self._look_at_all = self._make_judge(self._store, self.world_size)
        self._look_at_all()

    def _is_first(self) -> bool:
        store: Any = self._store
        for rank in range(self.rank):
            key = f"{prefix()}post/{rank}"
            if not store.check([key]):
                return False
            if json.loads(store.get(key))["state"] not in ("ended", "failed"):
                return False
        return True


def _connected() -> Any:
    """Return a connection of our own to the job's store, or None while it has none."""
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not (has_agent and host and port):
        if not dist.is_initialized():
            return None
        store = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        if not isinstance(store, TCPStore):
            return store.clone() if hasattr(store, "clone") else store
        host, port = store.host, str(store.port)
    patience = timedelta(seconds=60)
    return TCPStore(host, int(port), None, False, patience, wait_for_workers=False)


def _outermost(seats: list[Act]) -> Act | None:
    """A meeting that waits in a store waits for the ranks; else the innermost call."""
    taken = list(seats)
    if not taken:
        return None
    meetings = [act for act in taken if act.kind == "meeting"]
    return meetings[0] if meetings else taken[-1]


def _has_users(frame: FrameType | None) -> bool:
    while frame is not None:
        if is_users(frame.f_code):
            return True
        frame = frame.f_back
    return False


def _joins(frame: FrameType) -> bool:
    """Return True if the thread waits for the end of another thread."""
    code = frame.f_code
    is_threading = code.co_filename == threading.__file__
    return is_threading and code.co_name in _JOINING


def _flight_record() -> list[dict[str, Any]]:
    """What torch has recorded; NCCL has a recorder of its own."""
    from torch._C import _distributed_c10d

    found: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            found += json.loads(dump()).get("entries", [])
    return sorted(found, key=lambda entry: int(entry["time_created_ns"]))


def _act_of(entry: dict[str, Any], acts: list[Act]) -> Act | None:
    """The call from Python that has started this one; None if it was C++."""
    group, created_ns = str(entry["process_group"][0]), int(entry["time_created_ns"])
    for act in reversed(acts):
        is_before = act.group == group and act.created_ns <= created_ns
        if is_before and (not act.issued_ns or created_ns <= act.issued_ns):
            return act  # the innermost, if a hook calls something inside backward()
    return None


def _num_under_way() -> int:
    return sum(not _is_over(entry) for entry in _flight_record())


def _is_over(entry: dict[str, Any]) -> bool:
    return bool(entry["retired"]) or entry["state"] == "completed"


def _act(act: Act) -> dict[str, Any]:
    return {
        "kind": act.kind,
        "op": act.op,
        "group": act.group,
        "number": act.number,
        "issued": bool(act.issued_ns),
        "channel": act.channel,
        "members": act.members,
        "inputs": act.inputs,
        "outputs": act.outputs,
        "dtype": act.dtype,
        "root": act.root,
        "reduce_op": act.reduce_op,
        "takes": act.takes,
        "gives": act.gives,
        "place": act.place,
        "created_ns": act.created_ns,
        "gives_up": act.gives_up,
        "done": act.done,
        "failed": act.failed,
        "others": act.others,
    }


def _thread(thread: dict[str, Any]) -> dict[str, Any]:
    frame: FrameType = thread["frame"]
    act: Act | None = thread["act"]
    return {
        "main": thread["main"],
        "sleeps": thread.get("sleeps", False),
        "act": act and _act(act),
        "place": place_of(frame),
        "stack": stack_of(frame),
    }


def _channels(logs: dict[Channel, Messages]) -> list[dict[str, Any]]:
    return [
        {
            "channel": channel,
            "count": log.count,
            "newest": [_act(act) for act in list(log.newest)],
        }
        for channel, log in list(logs.items())
    ]


def _write_error_file(sentence: str) -> None:
    """Tell the agent why this rank ends, as torch's @record does."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": sentence, "timestamp": str(int(time.time()))}
    record = {"message": {"message": sentence, "extraInfo": extra}}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump(record, file)
