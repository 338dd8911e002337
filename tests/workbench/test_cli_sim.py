"""`distlab sim` and `distlab scale`: figures of runs, and what they refuse."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from distlab.cli.sim import scale, sim
from distlab.cli.sim_report import FORMULAS, size_words
from distlab.curriculum import Curriculum, Progress
from distlab.runner import Cluster
from distlab.sim.net.quantities import time_words
from distlab.simulated.results import KINDS
from tests.workbench.course import ROOT, Course, keep_warm
from tests.workbench.golden import Golden
from tests.workbench.refusals import refusal

Capture = pytest.CaptureFixture[str]
FILE = """
import torch


def ring(comm, tensor):
    n, rank = comm.world_size, comm.rank
    chunks, incoming = list(tensor.chunk(n)), torch.empty(len(tensor) // n)
    for step in range(n - 1):
        give, take = (rank - step) % n, (rank - step - 1) % n
        comm.sendrecv(chunks[give], (rank + 1) % n, incoming, (rank - 1) % n)
        chunks[take] += incoming
    for step in range(n - 1):
        give, take = (rank - step + 1) % n, (rank - step) % n
        comm.sendrecv(chunks[give], (rank + 1) % n, chunks[take], (rank - 1) % n)


def everybody_waits(comm, tensor):
    comm.recv(tensor, (comm.rank + 1) % comm.world_size)


def breaks(comm, tensor):
    raise RuntimeError("on purpose")


def wrong_all_reduce(comm, tensor):
    print("I only double it")
    tensor *= 2


def odd(comm, weight):
    pass


def alone(tensor):
    pass
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> Path:
    keep_warm(cluster, monkeypatch)
    course = Course(tmp_path)
    monkeypatch.chdir(course.root)
    monkeypatch.setenv("DISTLAB_STATE", str(course.state))
    path = tmp_path / "algorithms.py"
    path.write_text(FILE)
    return path


def test_a_star_has_a_hot_spot_and_a_ring_has_none(file: Path, capsys: Capture) -> None:
    assert sim("1.4", world_size=16, as_json=True, code="reference") == 0
    star = json.loads(capsys.readouterr().out)
    assert sim(f"{file}:ring", world_size=16, as_json=True) == 0
    ring = json.loads(capsys.readouterr().out)
    assert star["messages"] == 30
    assert ring["messages"] == 2 * 15 * 16
    assert star["results"] == ring["results"] == 1
    assert star["busiest_bytes"] == 15 * star["median_bytes"]
    assert ring["busiest_bytes"] == ring["median_bytes"]
    assert ring["time_s"] < star["time_s"] / 4
    page = Path(star["html"]).read_text()
    assert "<script" in page
    assert "http://" not in page


def test_in_words(file: Path, capsys: Capture, golden: Golden) -> None:
    assert sim("1.4", world_size=8, size="64KiB") == 0
    assert sim(f"{file}:ring", world_size=8, fault="restart=3@20us-50us") == 1
    said = capsys.readouterr().out
    again = r"\brank 3\b.*\b20 µs\b.*\brank 3\b.*\b50 µs\b"
    assert re.search(again, " ".join(said.split()))
    assert sim(f"{file}:wrong_all_reduce", world_size=4) == 1
    assert scale(f"{file}:wrong_all_reduce", worlds=(2, 4)) == 1
    golden("cli/sim", said + capsys.readouterr().out)


def test_a_run_that_gets_stuck_or_fails_is_explained(
    file: Path, capsys: Capture
) -> None:
    assert sim(f"{file}:everybody_waits", world_size=3) == 1
    assert re.search(r"DEADLOCK +ranks 0→1→2→0\b", capsys.readouterr().out)
    assert sim(f"{file}:breaks", world_size=2, as_json=True) == 1
    assert "on purpose" in json.loads(capsys.readouterr().out)["explanation"]


def test_a_wrong_result_is_no_success(file: Path, capsys: Capture) -> None:
    assert sim(f"{file}:wrong_all_reduce", world_size=4, as_json=True) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["wrong_ranks"] == [0, 1, 2, 3]
    assert told["known"] == KINDS["all_reduce"]
    assert told["printed"] == ["I only double it"]
    assert scale(f"{file}:wrong_all_reduce", worlds=(2, 4), as_json=True) == 1
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [len(run["wrong_ranks"]) for run in runs] == [2, 4]


@pytest.mark.parametrize(
    ("task", "known", "is_named", "results", "collectives"),
    [
        ("1.3", ["broadcast"], True, 1, 0),
        ("1.6", [], False, 1, 4),
        ("1.14", ["all_gather", "reduce_scatter"], True, 3, 0),
        ("1.7", [], False, 1, 5),
    ],
)
def test_what_comes_out_is_looked_at(
    file: Path,
    capsys: Capture,
    task: str,
    known: list[str],
    is_named: bool,
    results: int,
    collectives: int,
) -> None:
    assert sim(task, world_size=3, code="reference", size="4KiB", as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["wrong_ranks"], told["results"]) == ([], results)
    assert all(KINDS[kind] in told["known"] for kind in known)
    assert (told["is_named"], told["collectives"]) == (is_named, collectives)


def test_a_straggler_makes_it_slower(file: Path, capsys: Capture) -> None:
    times = []
    for fault in ("", "straggler=3:5"):
        assert sim(f"{file}:ring", world_size=8, fault=fault, as_json=True) == 0
        times.append(json.loads(capsys.readouterr().out)["time_s"])
    assert times[1] > 2 * times[0]


def test_faults_that_never_came_to_pass_are_named(
    file: Path, capsys: Capture, golden: Golden
) -> None:
    told = []
    for fault, named in (
        ("kill=3@9s", ["3", "9"]),
        ("loss=0.0001%", ["112"]),
        ("duplicate=0.0001%", ["112"]),
        ("partition=0-3@8s-9s", ["8"]),
        ("partition=3@1us-2us,partition=3@8s-9s", ["8"]),
        ("restart=3@8s-9s", ["3", "8"]),
        ("freeze=3@8s-9s", ["3", "8"]),
        ("kill=store@9s", ["9"]),
        ("torn=3@0-9s", ["3"]),
        ("straggler=3:2,freeze=2@1us-2us,restart=store@1us-2us", []),
    ):
        assert sim(f"{file}:ring", world_size=8, fault=fault, as_json=True) == 0
        unstruck = json.loads(capsys.readouterr().out)["unstruck"]
        assert len(unstruck) == bool(named), fault
        assert re.findall(r"\b\d+\b", " ".join(unstruck)) == named, fault
        told.append(f"{fault}: {' '.join(unstruck)}")
    golden("cli/sim-unstruck", "\n".join(told))


def test_a_death_has_its_time_and_the_trace_its_place(
    file: Path, capsys: Capture, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    args = {"fault": "kill=3@20us", "perfetto": str(trace)}
    assert sim(f"{file}:ring", world_size=8, **args) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"\brank 3\b[^;]*\bSIGKILL\b", said)
    assert re.search(r"\brank 3\b[^;]*\b20 µs", said)
    assert "trace.json" in said
    assert trace.is_file()


def test_scale_has_formulas_and_the_bound_beside_it(
    file: Path, capsys: Capture
) -> None:
    assert scale("1.4", worlds=(2, 4, 8), as_json=True, code="reference") == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["world_size"] for run in runs] == [2, 4, 8]
    for run in runs:
        assert run["bound_s"] < min(run["time_s"], run["ring_s"], run["tree_s"])
    assert scale("1.17", worlds=(2, 8), code="reference") == 0
    said = capsys.readouterr().out
    assert "ranks" in said
    assert FORMULAS["bound_s"] in said
    assert len(said.splitlines()) == 5


@pytest.mark.parametrize(
    ("target", "net", "named"),
    [
        ("1.2", "ethernet-100g", "reduce_scatter"),
        ("1.4", "nvlink:8,nic=400Gbit", "ethernet-100g"),
        ("1.14", "ethernet-100g", "collectives:all_"),
        ("3.7", "ethernet-100g", ""),
        ("FILE:ring", "ethernet-100g", ""),  # its result says what it is for
        ("FILE:wrong_all_reduce", "ethernet-100g", ""),  # and here its name
        ("FILE:ring", "dgx-h100", "ethernet-100g"),
    ],
)
def test_where_no_formula_stands_the_reason_does(
    file: Path, capsys: Capture, target: str, net: str, named: str
) -> None:
    target = target.replace("FILE", str(file))
    code = "" if ".py" in target else "reference"
    for verb in (sim, scale):
        size = {"world_size": 4} if verb is sim else {"worlds": (1, 4)}
        verb(target, net=net, size="4KiB", code=code, **size)  # type: ignore[operator]
        said = capsys.readouterr().out
        why = [line for line in said.splitlines() if re.match(r" *formula", line)]
        assert len(why) == bool(named)
        assert all(named in line for line in why)
        assert (FORMULAS["bound_s"] in said) == (not named)
    assert sim("1.4", world_size=1, net=net, size="4KiB", code="reference") == 0
    assert "formula" not in capsys.readouterr().out


def test_nobody_takes_simulated_time_for_their_own(file: Path, capsys: Capture) -> None:
    page = file.with_name("run.html")
    assert sim(f"{file}:ring", world_size=4, size="4KiB", html=str(page)) == 0
    said = capsys.readouterr().out
    took = r"\b60\.49 µs [\w ]*\bsimulated\b"
    assert re.search(took, said)
    assert re.search(r"\bsimulated [\w ]*\d+\.\d\d s\b", said)
    assert re.search(took, page.read_text(encoding="utf-8"))


def test_the_readme_shows_what_is_printed(file: Path, capsys: Capture) -> None:
    """The times are virtual: they are the same on every machine."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme.split("<!-- begin scale: ")[1].split("<!-- end -->")[0]
    typed, _, block = shown.partition(" -->\n")
    worlds = tuple(int(n) for n in re.findall(r"-n (\d+)", typed))
    assert scale(typed.split()[2], worlds=worlds, code="reference") == 0
    said = capsys.readouterr().out.splitlines()
    assert block.strip().splitlines() == ["```", *said[:-1], "```"]


BAD: list[tuple[str, dict[str, object], str]] = [
    ("1.99", {}, r"'1\.99'"),
    ("collectives", {}, r"collectives\.exchange"),
    ("collectives:nothing", {}, r"\bnothing\b.*\bsend_recv\b"),
    ("missing.py:ring", {}, rf"missing\.py\b.*{os.strerror(errno.ENOENT)}"),
    ("FILE:nothing", {}, r"algorithms\.py .*\bnothing\b.*\bring\b"),
    ("FILE", {}, r"algorithms\.py .*FILE\.py:NAME.*\bring\b"),
    ("FILE:ring", {"beside": True}, r"--beside\b"),
    ("1.3", {"code": "mine"}, r"\b1\.3\b"),
    ("FILE:odd", {}, r"\bodd\b.*\bweight\b"),
    ("FILE:alone", {}, r"\balone\b.*\bcomm\b"),
    ("1.8", {}, r"\bcomm\b"),
    ("1.4", {"net": "foo"}, '"foo"'),
    ("1.4", {"net": "alpha=-1us,bw=1Gbit"}, "alpha"),
    ("1.4", {"fault": "kill=3"}, '"3".*@'),
    ("1.4", {"fault": "kill=99@1s"}, r"\b99\b"),
    ("1.4", {"fault": "restart=ps@1s-2s"}, r"\b0 … 63\b.*\bstore\b"),
    ("1.4", {"fault": "restart=0@2s"}, "RANK@FROM-TO"),
    ("1.4", {"size": "1MB/s"}, "1MB/s"),
    ("1.4", {"world_size": 0}, r"^0 .*\b1\b.*\b4,096\b"),
    ("1.4", {"world_size": 100_000}, r"\b100000\b.*\b1\b.*\b4,096\b"),
    ("1.4", {"world_size": 4096, "size": "1GB"}, "--size"),
    ("1.4", {"code": "yours"}, r"--code\b.*'yours'"),
]


def test_bad_input_is_one_sentence(file: Path, golden: Golden) -> None:
    told = []
    for name, options, named in BAD:
        said = refusal(ValueError, sim, name.replace("FILE", str(file)), **options)
        assert re.search(named, said), (name, options, said)
        assert "\n" not in said
        told.append(said)
    golden("cli/sim-refused", "\n".join(told))


def test_a_file_that_is_no_python(file: Path) -> None:
    file.write_text("def ring(comm:\n")
    with pytest.raises(ValueError, match=r"\bline 1\b"):
        sim(f"{file}:ring")


def test_sizes_and_times_in_words() -> None:
    assert [size_words(n) for n in (5, 1024, 3 << 20)] == ["5 B", "1 KiB", "3 MiB"]
    times = {2.5: "2.5 s", 0.0123: "12.3 ms", 5e-6: "5 µs", 1.1e-19: "0 ns"}
    assert {s: time_words(s) for s in times} == times


@pytest.mark.parametrize("play", [sim, scale])
def test_without_a_name_it_is_the_task_that_was_checked_last(
    here: Course, monkeypatch: pytest.MonkeyPatch, play: Callable[..., int]
) -> None:
    progress, asked = Progress(here.root), list[str]()

    def settings(_: Curriculum, name: str, *rest: object) -> NoReturn:
        asked.append(name)
        raise ValueError("enough")

    monkeypatch.setattr("distlab.cli.sim.settings_for", settings)
    for task in ("collectives.all_reduce", "fault_tolerance.load"):
        progress.record_verdict(task, passed=False, digest="")
        with pytest.raises(ValueError, match=r"enough|^4\.4 "):
            play("")
    assert asked == ["1.4"]  # in 4.4 no rank sends anything
