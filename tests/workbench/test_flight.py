"""`distlab explain-hang`: what dumps of torch's flight recorder say about a hang.

The dumps of gloo are real: flight_ranks.py hangs and writes them. One of NCCL's is real
as well: nccl_rank_1.json was written by torch 2.11 on an H100 when the watchdog of rank
1 timed out, and only its folders were renamed. All other cases of NCCL are built by
`entry` and `dump` after the fields in torch's FlightRecorder.hpp, version 2.10, and
after the names and states that torch's own reader expects
(torch/distributed/flight_recorder/components/types.py).
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distlab.cli.app import app
from distlab.cli.explain_hang import explain_hang
from distlab.flight import Hang, as_json, find_hang, page, read_dumps
from tests.workbench import flight_ranks
from tests.workbench.course import ROOT
from tests.workbench.golden import Golden
from tests.workbench.refusals import refusal

Entry = dict[str, Any]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flight")
    subprocess.run(
        [sys.executable, "-m", "tests.workbench.flight_ranks", folder],
        cwd=ROOT,
        check=True,
        timeout=120,
    )
    return folder


def line_of(text: str) -> int:
    lines = Path(flight_ranks.__file__).read_text(encoding="utf-8").splitlines()
    return 1 + next(number for number, line in enumerate(lines) if text in line)


def dumps_in(folder: Path, kind: str = "dump") -> list[Path]:
    return sorted(folder.glob(f"{kind}_?"))


def told(folder: Path, case: str) -> str:
    records = read_dumps(dumps_in(folder / case))
    return "\n".join(line for _, line in page(records, find_hang(records)))


def test_real_ranks_that_make_different_calls(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = dumps_in(recorded / "mismatch")
    assert explain_hang(files, as_json_object=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["differ"]) == ("mismatch", "operation")
    assert (found["world_size"], found["missing"], found["absent"]) == (3, [], [])
    calls = found["calls"]
    assert [call["operation"] for call in calls] == ["barrier"] + 2 * ["all_reduce"]
    assert {call["number"] for call in calls} == {3}
    assert [call["line"] for call in calls] == [
        line_of("# rank 0 hangs here"),
        *2 * [line_of("# ranks 1 and 2 hang here")],
    ]
    assert [call["dtype"] for call in calls] == [None, "float64", "float64"]
    assert all(call["file"] == flight_ranks.__file__ for call in calls)
    assert [row["state"] for row in found["ranks"]] == 3 * ["waiting"]


def test_real_ranks_in_json_without_frames(recorded: Path) -> None:
    found = find_hang(read_dumps(dumps_in(recorded / "mismatch", "json")))
    assert (found.kind, found.differ) == ("mismatch", "operation")
    assert [call.place for call in found.calls.values()] == 3 * [None]


def test_a_real_rank_that_never_called(recorded: Path) -> None:
    records = read_dumps(dumps_in(recorded / "absent"))
    found = find_hang(records)
    assert (found.kind, found.absent, set(found.calls)) == ("absent", (1,), {0})
    assert (found.calls[0].op, found.calls[0].shape) == ("all_gather", (2, 4))
    last = as_json(records, found)["ranks"][1]
    assert last["state"] == "not in a call"
    assert last["call"]["line"] == line_of("# the last call of rank 1")


def test_real_ranks_that_enter_two_groups_in_opposite_order(recorded: Path) -> None:
    found = find_hang(read_dumps(dumps_in(recorded / "circle")))
    # Gloo doesn't list the members of a group, so this isn't proof of a circle.
    assert (found.kind, set(found.calls)) == ("apart", {0, 1})
    assert found.calls[0].group != found.calls[1].group


def test_real_ranks_that_have_finished(recorded: Path) -> None:
    assert explain_hang(dumps_in(recorded / "finished")) == 0


def test_a_real_rank_without_a_dump(recorded: Path) -> None:
    records = read_dumps(dumps_in(recorded / "mismatch")[1:])
    found = find_hang(records)
    assert (records.missing, found.kind, found.absent) == ([0], "no-dump", (0,))
    records = read_dumps(dumps_in(recorded / "mismatch")[:2], world_size=5)
    assert records.missing == [2, 3, 4]
    assert find_hang(records).absent == (2, 3, 4)


def test_sentences_on_real_ranks(recorded: Path, golden: Golden) -> None:
    golden(
        "cli/explain-hang", "\n\n".join(told(recorded, c) for c in flight_ranks.CASES)
    )


# ── NCCL ────────────────────────────────────────────────────────────────────────────


def entry(
    op: str,
    number: int,
    size: Sequence[int] = (4,),
    *,
    out: Sequence[int] | None = None,
    state: str = "completed",
    group: tuple[str, str] = ("0", "default_pg"),
    dtype: str = "Float",
    line: int = 7,
) -> Entry:
    is_p2p = op.startswith(("send", "recv"))
    ended = state == "completed"
    return {
        "record_id": 0,
        "pg_id": int(group[0]),
        "process_group": group,
        "collective_seq_id": 0 if is_p2p else number,
        "p2p_seq_id": number if is_p2p else 0,
        "op_id": number,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": 1_000 * number + line,
        "duration_ms": 0.5 if ended else None,
        "input_sizes": [list(size)],
        "input_dtypes": [dtype],
        "output_sizes": [list(size if out is None else out)],
        "output_dtypes": [dtype],
        "state": state,
        "time_discovered_started_ns": None if state == "scheduled" else 1,
        "time_discovered_completed_ns": 2 if ended else None,
        "retired": True,  # the watchdog retires what timed out, too
        "timeout_ms": 600_000,
        "is_p2p": is_p2p,
        "frames": [
            {"name": "f", "filename": "/v/site-packages/torch/d.py", "line": 1},
            {"name": "step", "filename": "/job/train.py", "line": line},
            {"name": "main", "filename": "/job/main.py", "line": 2},
        ],
    }


def find(
    folder: Path,
    *ranks: Sequence[Entry],
    first: int = 0,
    groups: dict[str, list[int]] | None = None,
    world_size: int = 0,
) -> Hang:
    """Write a dump per rank, as the watchdog names it, and explain them."""
    members = groups or {"0": list(range(max(world_size, len(ranks))))}
    for rank, entries in enumerate(ranks):
        for index, one in enumerate(entries):
            one["record_id"] = first + index
        value = {
            "version": "2.10",
            "comm_lib_version": "2.27.5",
            "pg_config": {
                name: {"name": name, "desc": "", "ranks": str(ranks_of)}
                for name, ranks_of in members.items()
                if rank in ranks_of
            },
            "pg_status": {},
            "entries": list(entries),
        }
        path = folder / f"nccl_trace_rank_{rank}"
        path.write_bytes(pickle.dumps(value, protocol=2))
    return find_hang(read_dumps([folder]))


def start(op: str, number: int, size: Sequence[int] = (4,), **options: Any) -> Entry:
    return entry(op, number, size, state="started", **options)


def test_nccl_as_it_was_recorded() -> None:
    records = read_dumps([Path(__file__).with_name("nccl_rank_1.json")])
    found = find_hang(records)
    assert (found.kind, found.absent) == ("no-dump", (0,))
    call = found.calls[1]
    assert (call.op, call.number, call.shape, call.done) == (
        "all_reduce",
        4,
        (3,),
        False,
    )
    assert call.place == ("/home/user/train.py", 16)
    assert [c.done for c in records.dumps[1].calls] == [True, True, True, False]


def test_nccl_size(tmp_path: Path) -> None:
    found = find(
        tmp_path,
        [entry("all_reduce", 1), start("all_reduce", 2, (2, 4), line=20)],
        [entry("all_reduce", 1), start("all_reduce", 2, (4, 4), line=20)],
        [entry("all_reduce", 1), start("all_reduce", 2, (8,), line=20)],
    )
    assert (found.kind, found.differ) == ("mismatch", "size")
    assert [c.number for c in found.calls.values()] == [2, 2, 2]  # 8 is 2 × 4
    assert found.calls[1].place == ("/job/train.py", 20)


def test_nccl_dtype_and_the_names_of_functions(tmp_path: Path) -> None:
    half = start("_all_gather_base", 1, out=(8,), dtype="BFloat16")
    found = find(tmp_path, [start("_all_gather_base", 1, out=(8,))], [half])
    assert (found.kind, found.differ) == ("mismatch", "dtype")
    assert found.calls[1].op == "all_gather_into_tensor"
    assert [c.dtype for c in found.calls.values()] == ["float32", "bfloat16"]


def test_nccl_two_roots(tmp_path: Path) -> None:
    both = [start("gather", 1, out=(8,))], [start("gather", 1, out=(8,))]
    assert find(tmp_path, *both).differ == "root"
    one = [start("gather", 1, out=(8,))], [start("gather", 1, out=(0,))]
    assert find(tmp_path, *one).kind == "agree"


def test_the_first_disagreement_is_the_one_that_counts(tmp_path: Path) -> None:
    extra = [entry("broadcast", 1), entry("all_reduce", 2), start("all_reduce", 3)]
    other = [
        entry("all_reduce", 1, line=9),
        entry("all_reduce", 2),
        start("barrier", 3),
    ]
    found = find(tmp_path, extra, other)
    assert (found.differ, found.calls[0].number) == ("operation", 1)


def test_nccl_groups(tmp_path: Path) -> None:
    tp = ("3", "mesh_tp")
    found = find(
        tmp_path,
        [start("all_reduce", 5, group=tp)],
        [start("_reduce_scatter_base", 5, group=tp)],
        [start("all_reduce", 1)],
        groups={"0": [0, 1, 2], "3": [0, 1]},
    )
    assert (found.kind, found.absent, set(found.calls)) == ("mismatch", (), {0, 1})
    assert found.calls[0].group == ("3", (0, 1))


def test_a_rank_that_waits_elsewhere_is_not_the_cause(tmp_path: Path) -> None:
    # Rank 2 waits for rank 1, which waits for rank 0, which waits for nobody.
    found = find(
        tmp_path,
        [entry("all_reduce", 1)],
        [entry("all_reduce", 1), start("barrier", 1, group=("1", "undefined"))],
        [entry("all_reduce", 1), start("all_reduce", 2)],
        groups={"0": [1, 2], "1": [0, 1]},
    )
    assert (found.kind, found.absent, set(found.calls)) == ("absent", (0,), {1})


@pytest.mark.parametrize("first", [0, 500])
def test_nccl_a_recv_without_a_send(tmp_path: Path, first: int) -> None:
    pair = {"0": [0, 1], "4": [4, 6]}
    sent = [entry("send 0->1", 1), entry("send 0->1", 2)]
    received = [entry("recv 1<-0", 1), entry("recv 1<-0", 2), start("recv 1<-0", 3)]
    found = find(tmp_path, sent, received, groups=pair, first=first, world_size=2)
    assert (found.kind, found.absent, found.calls[1].number) == ("absent", (0,), 3)
    assert (found.calls[1].src, found.calls[1].dst) == (0, 1)


def test_nccl_two_groups_in_opposite_order(tmp_path: Path) -> None:
    one, two = ("1", "undefined"), ("2", "undefined")
    found = find(
        tmp_path,
        [start("all_reduce", 1, group=one)],
        [start("all_reduce", 1, group=two)],
        groups={"1": [0, 1], "2": [0, 1]},
    )
    assert (found.kind, set(found.calls)) == ("circle", {0, 1})
    assert [call.group[0] for call in found.calls.values()] == ["1", "2"]


def test_nccl_both_receive_first(tmp_path: Path) -> None:
    found = find(tmp_path, [start("recv 0<-1", 1)], [start("recv 1<-0", 1)])
    assert (found.kind, set(found.calls)) == ("circle", {0, 1})


def test_nccl_a_message_of_another_size(tmp_path: Path) -> None:
    found = find(tmp_path, [start("send 0->1", 1)], [start("recv 1<-0", 1, (5,))])
    assert (found.kind, found.differ) == ("mismatch", "size")


def test_ranks_of_a_message_are_those_of_the_job(tmp_path: Path) -> None:
    found = find(
        tmp_path,
        [],
        [start("recv 0<-1", 1, group=("7", "pp"))],
        [],
        groups={"7": [1, 2]},
    )
    assert (found.kind, found.absent) == ("absent", (2,))
    assert (found.calls[1].src, found.calls[1].dst) == (2, 1)


def test_calls_that_may_differ(tmp_path: Path) -> None:
    ranks = [
        [
            entry("all_to_all", 1, (rank + 1,), out=(3,)),
            entry("all_gather", 2, (rank + 1,), out=(3,)),
            start("all_reduce", 3),
        ]
        for rank in range(2)
    ]
    assert find(tmp_path, *ranks).kind == "agree"
    lost = [call for call in ranks[0] if call["op_id"] > 1]  # the buffer was full
    assert find(tmp_path, lost, ranks[1], first=9).kind == "agree"


@pytest.mark.parametrize(
    "name", ["nccl_trace_rank_3", "rank3_1700000000", "a.3", "2_fr_3.json", "fr3.pkl"]
)
def test_the_name_of_a_file_has_the_rank(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"version": "2.10", "entries": []}')
    assert list(read_dumps([tmp_path]).dumps) == [3]


def test_many_ranks_share_rows(tmp_path: Path) -> None:
    ranks = [[start("all_reduce", 1)] for _ in range(63)]
    found = find(tmp_path, *ranks, [start("barrier", 1)], world_size=65)
    records = read_dumps([tmp_path])
    assert (found.absent, records.missing) == ((64,), [64])
    rows = [line for _, line in page(records, found)[3:6]]
    assert [row.split()[0] for row in rows] == ["0–62", "63", "64"]


# ── files that are no dumps ─────────────────────────────────────────────────────────


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harm",)


def test_files_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = pickle.dumps({"version": "2.10", "entries": [entry("barrier", 1)]})
    odd = entry("barrier", 1) | {"input_sizes": 3}
    files = {
        "harmful_0": pickle.dumps({"version": "2.10", "entries": [Harmful()]}),
        "cut_0": whole[:-20],
        "empty_0": b"",
        "deep_0": b"[" * 200_000,
        "text_0": b"rank 0: hello",
        "list_0.json": b"[1, 2]",
        "later_0.json": b'{"version": "3.0", "entries": []}',
        "odd_0": pickle.dumps({"version": "2.10", "entries": [odd]}),
        "notes.txt": whole,
    }
    said = []
    for name, data in files.items():
        Path(name).write_bytes(data)
        said.append(refusal(ValueError, explain_hang, [Path(name)]))
        assert name in said[-1]
    assert not Path("harm").exists()
    Path("good_0").write_bytes(whole)
    Path("nothing").mkdir()
    twice = [Path("good_0"), Path("good_0")]
    said.append(refusal(ValueError, explain_hang, twice))
    said.append(refusal(ValueError, explain_hang, [Path("missing_0")]))
    said.append(refusal(ValueError, explain_hang, [Path("nothing")]))
    assert explain_hang([Path("good_0")]) == 0
    golden("cli/explain-hang-refused", "\n".join(said))


def test_the_verb_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a_0").write_text("no dump")
    done = CliRunner().invoke(app, ["explain-hang", str(tmp_path / "a_0")])
    assert (done.exit_code, done.stdout) == (2, "")
    (tmp_path / "a_0").write_bytes(pickle.dumps({"version": "2.10", "entries": []}))
    page = tmp_path / "calls.html"
    line = ["explain-hang", str(tmp_path), "--ranks", "2", "--html", str(page)]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0
    assert "trace-data" in page.read_text(encoding="utf-8")
    assert re.search(r"^1 +no dump$", done.stdout, re.MULTILINE)
