"""When the posts of ranks prove a hang, and when they don't; nothing runs here.

The posts are those that `distlab.recorder.recorder` writes. test_run.py has the runs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distlab.comm import ANY
from distlab.flight.drawn import run_of
from distlab.flight.live import Finding, Quiet, find
from distlab.flight.page import concept_of
from distlab.flight.told import lines_of, report_of, row_of, stacks_of, write_report
from distlab.flight.watch import Watch
from distlab.recorder import agreement
from distlab.recorder.journal import Act, Journal, _is_short
from distlab.recorder.recorder import Recorder, _act
from distlab.trace import trace_of
from distlab.trace.model import STATES
from tests.workbench.golden import Golden

TRAIN = str(Path("train.py").absolute())  # as it is shown from here
WORLD = "0"
GROUPS = {WORLD: (0, 1, 2), "rows": (0, 1), "columns": (0, 1)}
Post = dict[str, Any]


def collective(op: str, number: int = 1, line: int = 1, **facts: Any) -> Act:
    group = facts.pop("group", WORLD)
    members = facts.pop("members", GROUPS[group])
    facts = {"inputs": [[3]], "outputs": [[3]], "dtype": "float32"} | facts
    if op == "barrier":
        facts |= {"inputs": [], "outputs": [], "dtype": ""}
    place = (TRAIN, line)
    return Act(
        "collective",
        op,
        group,
        number,
        members=members,
        place=place,
        created_ns=1000 * number,
        issued_ns=1000 * number + 1,
        **facts,
    )


def message(op: str, src: int, dst: int, number: int = 1, **facts: Any) -> Act:
    act = collective(op, number, **facts)
    act.kind, act.channel = op, (act.group, src, dst, 0)
    return act


def meeting(op: str, number: int = 1, line: int = 1) -> Act:
    place, members = (TRAIN, line), GROUPS[WORLD]
    return Act("meeting", op, "new groups", number, members=members, place=place)


def store(key: str, *, gives_up: bool = False) -> Act:
    place = (TRAIN, 1)
    return Act("store", "store.get", key, place=place, gives_up=gives_up)


@dataclass
class Rank:
    """What a rank waits for, and what it has called before."""

    waits: list[Act] = field(default_factory=list)
    called: list[Act] = field(default_factory=list)
    state: str = "still"
    num_events: int = 1


def entry(number: int, act: Act) -> dict[str, Any]:
    """A call, as torch's flight recorder lists it."""
    return {
        "record_id": number,
        "process_group": [act.group, "default_pg" if act.group == WORLD else act.group],
        "collective_seq_id": act.number,
        "p2p_seq_id": 0,
        "op_id": act.number,
        "is_p2p": False,
        "profiling_name": f"gloo:{act.op}",
        "op": act.op,
        "root": act.root,
        "reduce_op": act.reduce_op,
        "input_sizes": act.inputs,
        "output_sizes": act.outputs,
        "input_dtypes": [act.dtype] if act.dtype else [],
        "output_dtypes": [],
        "state": "scheduled",
        "retired": act.done,
        "time_created_ns": act.created_ns,
        "frames": [{"filename": act.place[0], "line": act.place[1], "name": ""}]
        if act.place
        else [],
    }


def logs(acts: list[Act], op: str) -> list[dict[str, Any]]:
    found: dict[Any, list[Act]] = {}
    for act in acts:
        if act.kind == op:
            found.setdefault(act.channel, []).append(act)
    return [
        {"channel": channel, "count": len(of), "newest": [_act(act) for act in of]}
        for channel, of in found.items()
    ]


def post(number: int, rank: Rank) -> Post:
    """What the rank would have written into the store."""
    now_s = time.time()
    made: Post = {
        "rank": number,
        "world_size": 3,
        "pid": 1000 + number,
        "host": "here",
        "state": rank.state,
        "error": "",
        "num_events": rank.num_events,
        "has_left": False,
        "posted_at_s": now_s,
        "beat_s": 5.0,
        "moved_at_s": now_s,
        "threads": [
            {
                "main": index == 0,
                "sleeps": rank.state == "still",
                "act": _act(act),
                "place": act.place,
                "stack": [[TRAIN, act.place[1], "step"]] if act.place else [],
            }
            for index, act in enumerate(rank.waits)
        ],
    }
    if rank.state == "moves":
        return made
    acts = [*rank.called, *(a for a in rank.waits if a not in rank.called)]
    calls = [act for act in acts if act.kind == "collective" and act.number]
    groups = {
        name: {"ranks": json.dumps(ranks), "desc": ""} for name, ranks in GROUPS.items()
    }
    return made | {
        "dump": {
            "version": "2.11",
            "entries": [entry(index, act) for index, act in enumerate(calls)],
            "pg_config": groups,
        },
        "sends": logs(acts, "send"),
        "recvs": logs(acts, "recv"),
        "meetings": [_act(act) for act in acts if act.kind == "meeting"],
    }


def posts(*ranks: Rank | None) -> dict[int, Post]:
    return {n: post(n, rank) for n, rank in enumerate(ranks) if rank is not None}


def found(*ranks: Rank | None, is_late: bool = False) -> Finding | None:
    # Each post goes through JSON, as it does in a job.
    told = {int(n): p for n, p in json.loads(json.dumps(posts(*ranks))).items()}
    return find(told, len(ranks), is_late=is_late)


def done(act: Act) -> Act:
    act.done = True
    return act


REDUCE, BARRIER = "all_reduce", "barrier"


# ── what is a hang ──────────────────────────────────────────────────────────────────


def test_two_operations_are_a_mismatch() -> None:
    finding = found(
        Rank([collective(BARRIER, 2, line=18)], [done(collective(REDUCE))]),
        *[
            Rank([collective(REDUCE, 2, line=20)], [done(collective(REDUCE))])
            for _ in range(2)
        ],
    )
    assert finding is not None
    assert (finding.status, finding.hang.differ) == ("mismatch", "operation")
    assert finding.ranks == [0, 1, 2]
    lines = {rank: call.place for rank, call in finding.hang.calls.items()}
    assert {r: place and place[1] for r, place in lines.items()} == {
        0: 18,
        1: 20,
        2: 20,
    }


@pytest.mark.parametrize(
    ("other", "differ"),
    [
        ({"dtype": "float64"}, "dtype"),
        ({"inputs": [[4]]}, "size"),
        ({"root": 1}, "root"),
    ],
)
def test_unlike_arguments_are_a_mismatch(other: dict[str, Any], differ: str) -> None:
    usual = {"root": 0, "reduce_op": "SUM"}
    finding = found(
        Rank([collective("reduce", **usual)]),
        Rank([collective("reduce", **(usual | other))]),
        Rank([collective("reduce", **usual)]),
    )
    assert finding is not None
    assert (finding.status, finding.hang.differ) == ("mismatch", differ)


def test_a_rank_that_has_ended_is_a_deadlock_for_the_others() -> None:
    finding = found(
        Rank([collective(REDUCE, 2)], [done(collective(REDUCE))]),
        Rank([collective(REDUCE, 2)], [done(collective(REDUCE))]),
        Rank([], [done(collective(REDUCE))], state="ended"),
    )
    assert finding is not None
    assert (finding.status, finding.hang.absent) == ("deadlock", (2,))
    assert finding.records.ended == {2}


def test_two_groups_entered_in_opposite_order_are_a_circle() -> None:
    finding = found(
        Rank([collective(REDUCE, group="rows", line=5)]),
        Rank([collective(REDUCE, group="columns", line=7)]),
    )
    assert finding is not None
    assert (finding.status, finding.hang.kind) == ("deadlock", "circle")
    assert finding.ranks == [0, 1]


def test_receives_from_each_other_are_a_deadlock() -> None:
    finding = found(
        Rank([message("recv", 1, 0)]),
        Rank([message("recv", 0, 1)]),
        Rank([], state="ended"),
    )
    assert finding is not None
    assert finding.status == "deadlock"
    assert {0, 1} <= set(finding.ranks)


def test_a_message_with_another_tag_is_a_mismatch() -> None:
    receives = message("recv", 0, 1)
    assert receives.channel is not None
    receives.channel = (*receives.channel[:3], 4)
    finding = found(
        Rank([message("send", 0, 1)]), Rank([receives]), Rank([], state="ended")
    )
    assert finding is not None
    assert (finding.status, finding.hang.differ) == ("mismatch", "tag")
    assert [call.tag for call in finding.hang.calls.values()] == [0, 4]


@pytest.mark.parametrize("op", ["send", "recv"])
def test_the_advice_on_a_circle_of_messages(op: str) -> None:
    peers = [(0, 1), (1, 0)] if op == "send" else [(1, 0), (0, 1)]
    finding = found(*[Rank([message(op, *pair)]) for pair in peers])
    assert finding is not None
    assert (finding.hang.kind, set(finding.hang.calls)) == ("circle", {0, 1})
    assert concept_of(finding.records, finding.hang) == "send-and-recv"


def test_a_receive_from_any_rank_waits_for_all_of_them() -> None:
    waiting = Rank([message("recv", ANY, 0)])
    finding = found(waiting, Rank([], state="ended"), Rank([], state="ended"))
    assert finding is not None
    assert set(finding.hang.calls) == {0}
    send = message("send", 1, 0)
    assert found(waiting, Rank([send]), Rank([], state="ended")) is None


def test_a_meeting_that_one_rank_has_passed_is_a_deadlock() -> None:
    finding = found(
        Rank([meeting("new_group", line=9)]),
        Rank([meeting("new_group", line=9)]),
        Rank([collective(BARRIER, line=11)]),
    )
    assert finding is not None
    assert finding.status == "deadlock"
    assert 2 in finding.ranks  # it never came


def test_unlike_groups_are_a_mismatch_though_their_members_all_wait() -> None:
    ranks = [
        Rank([collective(REDUCE)], [done(meeting(f"new_group({members})", line=line))])
        for members, line in (("[0]", 8), ("[1]", 9), ("[1]", 9))
    ]
    finding = found(*ranks)
    assert finding is not None
    assert (finding.status, finding.ranks) == ("mismatch", [0, 1, 2])
    assert concept_of(finding.records, finding.hang) == "own-groups-only"
    places = [call.place for call in finding.hang.calls.values()]
    assert places == [(TRAIN, 8), (TRAIN, 9), (TRAIN, 9)]


def test_a_key_that_nobody_can_set_any_more_is_a_deadlock() -> None:
    assert found(
        Rank([store("key")]), Rank([collective(BARRIER)]), Rank([], state="ended")
    )
    assert found(*[Rank([store("key")]) for _ in range(3)])


# ── what is none ────────────────────────────────────────────────────────────────────

WAITING = Rank([collective(REDUCE)])


@pytest.mark.parametrize(
    "third",
    [
        None,  # it hasn't posted yet
        Rank([], state="moves"),
        Rank([], state="failed"),
        Rank([collective(REDUCE)]),  # all have come: the network is at it
        Rank([store("key", gives_up=True)]),
        Rank([Act("unfinished", "wait", place=(TRAIN, 1))]),
        Rank([collective(BARRIER, gives_up=True)]),
    ],
)
def test_a_rank_that_may_go_on_is_no_hang(third: Rank | None) -> None:
    assert found(WAITING, WAITING, third) is None


def test_ranks_that_have_all_ended_are_no_hang() -> None:
    assert found(*[Rank([], state="ended")] * 3) is None


def test_a_message_under_way_is_no_hang() -> None:
    assert found(Rank([message("recv", 1, 0)]), Rank([message("send", 1, 0)])) is None


def test_a_thread_that_can_go_on_lets_its_rank_go_on() -> None:
    both = Rank([collective(REDUCE), message("recv", 1, 0)])
    sender = Rank([collective(BARRIER, 1, group="rows")], [message("send", 1, 0)])
    assert found(both, sender, WAITING) is None


def test_a_root_that_is_not_known_everywhere_proves_nothing() -> None:
    calls = [collective("reduce", root=root) for root in (0, None, 0)]
    assert found(*[Rank([act]) for act in calls]) is None


# ── a call held back ────────────────────────────────────────────────────────────────


def held_back() -> Rank:
    act = collective(BARRIER, 0, line=18)
    act.issued_ns = 0
    other = {"rank": 1, "op": REDUCE, "inputs": [[3]], "outputs": [[3]]}
    act.others = [
        other
        | {"dtype": "float32", "root": None, "reduce_op": "SUM", "place": ["t.py", 20]}
    ]
    return Rank([act])


def test_a_call_held_back_waits_for_the_other_ranks_a_moment() -> None:
    moving = Rank([], state="moves")
    assert found(held_back(), moving, moving) is None
    finding = found(held_back(), moving, moving, is_late=True)
    assert finding is not None
    assert (finding.status, finding.hang.differ) == ("mismatch", "operation")
    assert {0, 1} <= set(finding.ranks)


# ── the watch ───────────────────────────────────────────────────────────────────────


class Job:
    """A store, and a watch that looks at it."""

    def __init__(self, world_size: int = 2, **options: Any) -> None:
        self.store = dist.HashStore()
        self.told: list[Finding | Quiet] = []
        self.watch = Watch(self.store, "p/", world_size, self.told.append, **options)

    def post(self, *ranks: Rank | None) -> None:
        for number, one in posts(*ranks).items():
            self.store.set(f"p/post/{number}", json.dumps(one))
            self.store.add("p/posts", 1)

    @property
    def verdict(self) -> Mapping[str, Any] | None:
        if not self.store.check(["p/verdict"]):
            return None
        read: dict[str, Any] = json.loads(self.store.get("p/verdict"))
        return read


def rank_in_rows() -> Rank:
    return Rank([collective(REDUCE, group="rows")])


def test_the_watch_writes_its_verdict_into_the_store_once() -> None:
    job = Job(ends=False)
    assert job.watch.look() is None  # nobody has posted
    job.post(rank_in_rows())
    assert job.watch.look() is None
    job.post(None, Rank([], state="ended"))
    finding = job.watch.look()
    assert finding is not None
    assert job.told == [finding]
    sentence = finding.hang.sentence
    assert job.verdict == {"sentence": sentence, "ends": False, "num_alive": 1}
    assert job.watch.look() is None
    assert len(job.told) == 1


def test_without_progress_the_watch_says_where_all_ranks_are_once() -> None:
    job = Job(quiet_s=0.0)
    job.post(rank_in_rows(), Rank([], state="moves"))
    for _ in range(3):
        assert job.watch.look() is None
        time.sleep(0.001)
    (quiet,) = job.told
    assert isinstance(quiet, Quiet)
    assert (set(quiet.posts), quiet.world_size) == ({0, 1}, 2)
    assert job.verdict is None
    job.post(None, Rank([], state="moves", num_events=2))
    for _ in range(3):
        job.watch.look()
        time.sleep(0.001)
    assert len(job.told) == 2  # it had made progress in between


# ── what is told ────────────────────────────────────────────────────────────────────


def mismatch() -> Finding:
    finding = found(
        Rank([collective(BARRIER, line=18)]),
        Rank([collective(REDUCE, line=20)]),
        Rank([], state="ended"),
    )
    assert finding is not None
    return finding


def text_of(told: Finding | Quiet) -> str:
    return "\n".join(line for _, line in lines_of(told))


def test_a_finding_in_words_and_as_json(golden: Golden, tmp_path: Path) -> None:
    finding = mismatch()
    golden("run/mismatch", text_of(finding))
    told = report_of(finding)
    assert told["status"] == "mismatch"
    assert told["ranks_named"] == [0, 1, 2]
    row = told["ranks"][1]
    assert (row["rank"], row["state"], row["call"]) == (1, "waiting", REDUCE)
    assert (row["number"], row["line"]) == (1, 20)
    assert (row["shape"], row["dtype"]) == ([3], "float32")
    write_report(tmp_path / "hang.json", finding)
    written = json.loads((tmp_path / "hang.json").read_text("utf-8"))
    assert written["sentence"] == finding.hang.sentence
    stacks = "\n".join(line for _, line in stacks_of(finding.posts))
    assert "train.py:18" in stacks


def test_a_quiet_job_in_words_and_as_json(golden: Golden) -> None:
    ranks = posts(rank_in_rows(), Rank([], state="moves"), Rank([], state="ended"))
    quiet = Quiet(60.0, ranks, 4)
    golden("run/quiet", text_of(quiet))
    told = report_of(quiet)
    assert told["status"] == "no-progress"
    assert [row["rank"] for row in told["ranks"]] == [0, 1, 2, 3]
    assert row_of(0, ranks)["call"] == REDUCE
    assert row_of(3, ranks)["line"] is None


def test_the_timeline_of_a_finding() -> None:
    early = done(collective(REDUCE))
    finding = found(
        Rank([collective(BARRIER, 2, line=18)], [early]),
        Rank([collective(REDUCE, 2, line=20)], [early]),
        Rank([], [early], state="ended"),
    )
    assert finding is not None
    run = run_of(finding.records, finding.hang.sentence, "deadlock")
    assert (run.outcome, run.cycle) == ("deadlock", (0, 1))
    assert [rank.status for rank in run.ranks] == ["waiting", "waiting", "finished"]
    assert [rank.waiting and rank.waiting["line"] for rank in run.ranks] == [
        18,
        20,
        None,
    ]
    calls = trace_of(run).calls
    states = [STATES[state] for state in calls["state"].tolist()]
    assert states == ["done", "waiting", "done", "waiting", "done"]


def test_the_timeline_of_messages() -> None:
    finding = found(
        Rank([message("recv", 1, 0)], [message("recv", 2, 0)]),
        Rank([message("recv", 0, 1)]),
        Rank([], [message("send", 2, 0)], state="ended"),
    )
    assert finding is not None
    run = run_of(finding.records, finding.hang.sentence, "deadlock")
    assert run.waits_for == {0: (1,), 1: (0,)}
    assert (run.cycle, len(trace_of(run).messages)) == ((0, 1), 1)


def test_the_timeline_without_a_proof(tmp_path: Path) -> None:
    quiet = Quiet(60.0, posts(rank_in_rows(), Rank([], state="moves")), 2)
    write_report(tmp_path / "hang.html", quiet)
    assert "trace-data" in (tmp_path / "hang.html").read_text("utf-8")


def test_a_report_that_cannot_be_written_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report(tmp_path / "no" / "such" / "hang.json", mismatch())
    assert "hang.json" in capsys.readouterr().err


# ── a call that fails ───────────────────────────────────────────────────────────────


class Group:
    """Stands for torch's ProcessGroup, with a call that fails."""

    group_name = WORLD
    error: BaseException = ConnectionError("closed by peer")

    def monitored_barrier(self) -> None:
        raise self.error


def step(*, is_caught: bool) -> None:
    try:
        Group().monitored_barrier()
    except ConnectionError as error:
        raise (RuntimeError("step 4 failed") if is_caught else error) from None


@pytest.mark.parametrize(
    ("error", "is_caught", "stays"),
    [
        (ConnectionError("closed by peer"), False, True),
        (ConnectionError("closed by peer"), True, True),  # and raised as another one
        (KeyboardInterrupt(), False, False),
    ],
)
def test_a_rank_stays_in_the_call_whose_error_ends_it(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, is_caught: bool, stays: bool
) -> None:
    for name in ("monitored_barrier", "group_name"):
        monkeypatch.setattr(Group, name, getattr(Group, name))  # put back at the end
    monkeypatch.setattr(Group, "error", error)
    journal = Journal()
    journal.groups[WORLD] = GROUPS[WORLD]
    journal.attach(SimpleNamespace(ProcessGroup=Group, Work=Group, Store=Group))
    recorder = Recorder(journal, 0, 3)
    seen: list[list[str]] = []

    def wait(_: float) -> bool:
        seen.extend([act.op for act in seats] for seats in journal.seats.values())
        return False

    monkeypatch.setattr(recorder._verdict, "wait", wait)
    with pytest.raises(BaseException) as last:  # noqa: PT011
        step(is_caught=is_caught)
    recorder.fail(last.value)
    assert last.typename in recorder.error
    assert seen == ([["monitored_barrier"]] if stays else [])
    assert [act.failed for act in journal.meetings] == [stays]
    assert not any(journal.seats.values())


def test_an_error_of_backward_is_that_of_ddps_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(torch.autograd, "backward", fails)
    verify = "_verify_params_across_processes"
    monkeypatch.setattr(torch.distributed, verify, getattr(torch.distributed, verify))
    ddp = SimpleNamespace(
        require_backward_grad_sync=True,
        process_group=SimpleNamespace(group_name=WORLD),
        _join_config=SimpleNamespace(enable=False),
    )
    module = SimpleNamespace(
        DistributedDataParallel=SimpleNamespace(forward=lambda _: None)
    )
    journal = Journal()
    journal.groups[WORLD] = GROUPS[WORLD]
    journal.attach_ddp(module)
    module.DistributedDataParallel.forward(ddp)
    with pytest.raises(RuntimeError) as error:
        torch.autograd.backward(())
    act = journal.raised_in(error.value)
    assert act is not None
    assert (act.op, act.group) == ("backward", WORLD)


def test_an_error_of_the_script_itself_is_not_a_calls() -> None:
    with pytest.raises(ValueError, match="column") as error:
        raise ValueError("no such column")
    assert Journal().raised_in(error.value) is None


@pytest.mark.parametrize(
    ("has_failed", "has_left", "status"),
    [(True, True, "deadlock"), (True, False, ""), (False, True, "")],
)
def test_a_call_fails_whose_other_side_has_destroyed_its_groups(
    has_failed: bool, has_left: bool, status: str
) -> None:
    ranks = posts(
        Rank([collective(REDUCE, 2)], [done(collective(REDUCE))]),
        Rank([], [done(collective(REDUCE))], state="ended"),
        Rank([], [done(collective(REDUCE))], state="ended"),
    )
    ranks[0]["threads"][0]["act"]["failed"] = has_failed  # type: ignore[index]
    moves = {"state": "moves", "has_left": has_left, "threads": []}
    finding = find(ranks | {1: {**ranks[1], **moves}}, 3)
    assert (finding.status if finding else "") == status
    assert finding is None or 1 in finding.hang.absent


@pytest.mark.parametrize(
    ("timeout", "is_short"),
    [
        (None, False),
        (timedelta(seconds=-1), False),
        (timedelta(seconds=5), True),
        (timedelta(minutes=30), False),
    ],
)
def test_only_a_short_timeout_is_no_hang(
    timeout: timedelta | None, is_short: bool
) -> None:
    assert _is_short(timeout) is is_short


# ── calls compared before they start ────────────────────────────────────────────────


@pytest.fixture
def pair() -> list[agreement.Agreement]:
    """Two ranks of a machine, which number them 4 and 5, at one file."""
    path = agreement.create(2)
    both = [agreement.Agreement(path, rank, range(4, 6)) for rank in (4, 5)]
    os.unlink(path)
    return both


def call(op: str = REDUCE, group: str = WORLD, **facts: Any) -> Act:
    return collective(op, 0, group=group, members=(4, 5), **facts)


def test_calls_that_agree_say_nothing(pair: list[agreement.Agreement]) -> None:
    for _ in range(100):  # more than a slot holds
        for one in pair:
            act = call()
            one.compare(act)
            assert act.others == []


@pytest.mark.parametrize(
    ("other", "key", "value"),
    [
        (call(BARRIER), "op", BARRIER),
        (call(dtype="float64"), "dtype", "float64"),
        (call(inputs=[[4]]), "size", 4),
        (call(root=5), "root", 5),
        (call(reduce_op="MAX"), "reduce_op", "MAX"),
    ],
)
def test_the_second_rank_sees_the_call_of_the_first(
    pair: list[agreement.Agreement], other: Act, key: str, value: object
) -> None:
    other.others.clear()
    pair[0].compare(other)
    assert other.others == []  # the first can't know
    mine = call()
    pair[1].compare(mine)
    (seen,) = mine.others
    assert (seen["rank"], seen[key]) == (4, value)
    assert tuple(seen["place"]) == other.place


def test_a_later_call_and_another_group_are_not_compared(
    pair: list[agreement.Agreement],
) -> None:
    for act in (call(), call(BARRIER)):
        pair[0].compare(act)
    mine = call()  # the first of rank 5; the other is at its second
    pair[1].compare(mine)
    assert mine.others == []
    apart = call(BARRIER, group="rows")
    pair[1].compare(apart)
    assert apart.others == []
    second = call()
    pair[1].compare(second)
    assert [seen["op"] for seen in second.others] == [BARRIER]


def test_barriers_and_all_to_alls_may_differ_in_size(
    pair: list[agreement.Agreement],
) -> None:
    pair[0].compare(call("all_to_all_single", inputs=[[4]]))
    mine = call("all_to_all_single", inputs=[[6]])
    pair[1].compare(mine)
    assert mine.others == []


def test_a_file_that_ranks_have_left_is_removed() -> None:
    store = dist.HashStore()
    agreement.remove(store, "shared/0")  # there is none
    path = agreement.create(2)
    store.set("shared/0", path)
    agreement.remove(store, "shared/0")
    agreement.remove(store, "shared/0")
    assert not Path(path).exists()
