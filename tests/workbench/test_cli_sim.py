"""`distlab sim` and `distlab scale`: figures of runs, and what they refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from distlab.cli.sim import scale, sim
from distlab.cli.sim_report import size_words
from distlab.runner import Cluster
from distlab.sim.net.quantities import time_words
from tests.workbench.course import ROOT, Course, keep_warm

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


def test_in_words(file: Path, capsys: Capture) -> None:
    assert sim("1.4", world_size=8, size="64KiB") == 0
    said = capsys.readouterr().out
    assert "collectives.all_reduce, the reference's: 8 ranks, 64 KiB each" in said
    assert "a hot spot" in said
    assert "results    right on all ranks: the sum of all ranks' tensors" in said
    assert "timeline:" in said


def test_a_run_that_gets_stuck_or_fails_is_explained(
    file: Path, capsys: Capture
) -> None:
    assert sim(f"{file}:everybody_waits", world_size=3) == 1
    assert "DEADLOCK  0→1→2→0 all wait in recv" in capsys.readouterr().out
    assert sim(f"{file}:breaks", world_size=2, as_json=True) == 1
    assert "on purpose" in json.loads(capsys.readouterr().out)["explanation"]


def test_a_wrong_result_is_no_success(file: Path, capsys: Capture) -> None:
    assert sim(f"{file}:wrong_all_reduce", world_size=4) == 1
    said = capsys.readouterr().out
    assert "WRONG on all ranks: not the sum of all ranks' tensors" in said
    assert "[rank 0] I only double it" in said
    assert scale(f"{file}:wrong_all_reduce", worlds=(2, 4)) == 1
    assert "on 2 ranks it is not the sum" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("1.3", "right on all ranks: rank 0's tensor"),
        ("1.6", "collective 4 library calls"),
        ("1.14", "right on all ranks: all ranks' tensors in order and each"),
        ("1.7", "the same on all ranks"),
    ],
)
def test_what_comes_out_is_looked_at(
    file: Path, capsys: Capture, task: str, words: str
) -> None:
    assert sim(task, world_size=3, code="reference", size="4KiB") == 0
    assert words in capsys.readouterr().out


def test_a_straggler_makes_it_slower(file: Path, capsys: Capture) -> None:
    times = []
    for fault in ("", "straggler=3:5"):
        assert sim(f"{file}:ring", world_size=8, fault=fault, as_json=True) == 0
        times.append(json.loads(capsys.readouterr().out)["time_s"])
    assert times[1] > 2 * times[0]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("kill=3@9s", ["rank 3 was to die at 9 s: the run was over before"]),
        ("loss=0.0001%", ["none of the 112 messages was lost"]),
        ("duplicate=0.0001%", ["none of the 112 messages came twice"]),
        ("partition=0-3@8s-9s", ["the partition was to begin at 8 s"]),
        ("partition=3@1us-2us,partition=3@8s-9s", ["the partition was to begin at 8"]),
        ("restart=3@8s-9s", ["rank 3 was to crash at 8 s: the run was over before"]),
        ("freeze=3@8s-9s", ["rank 3 was to freeze at 8 s: the run was over before"]),
        ("kill=store@9s", ["the store was to die at 9 s: the run was over before"]),
        ("torn=3@0-9s", ["rank 3 was to crash in an operation on its disk: there was"]),
        ("straggler=3:2,freeze=2@1us-2us,restart=store@1us-2us", []),
    ],
)
def test_faults_that_never_came_to_pass_are_named(
    file: Path, capsys: Capture, fault: str, words: list[str]
) -> None:
    assert sim(f"{file}:ring", world_size=8, fault=fault, as_json=True) == 0
    unstruck = json.loads(capsys.readouterr().out)["unstruck"]
    assert len(unstruck) == len(words)
    assert all(
        said.startswith(word) for said, word in zip(unstruck, words, strict=True)
    )


def test_a_death_has_its_time_and_the_trace_its_place(
    file: Path, capsys: Capture, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    args = {"fault": "kill=3@20us", "perfetto": str(trace)}
    assert sim(f"{file}:ring", world_size=8, **args) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "rank 3 was killed by SIGKILL" in said
    assert "rank 3 died at 20 µs" in said
    assert "trace.json" in said
    assert trace.is_file()


def test_a_rank_that_restarts_is_told_of(file: Path, capsys: Capture) -> None:
    assert sim(f"{file}:ring", world_size=8, fault="restart=3@20us-50us") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "rank 3 crashed at 20 µs; rank 3 restarted at 50 µs" in said


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
    assert "at least" in said
    assert len(said.splitlines()) == 5


@pytest.mark.parametrize(
    ("target", "net", "none"),
    [
        ("1.2", "ethernet-100g", "for all_reduce, reduce_scatter, all_gather, bro"),
        ("1.4", "nvlink:8,nic=400Gbit", "for equal links, as in ethe"),
        ("1.14", "ethernet-100g", "for one function alone, such as collectives:all_"),
        ("3.7", "ethernet-100g", ""),
        ("FILE:ring", "ethernet-100g", ""),  # its result says what it is for
        ("FILE:wrong_all_reduce", "ethernet-100g", ""),  # and here its name
        ("FILE:ring", "dgx-h100", "for equal links, as in ethernet-100g"),
    ],
)
def test_where_no_formula_stands_the_reason_does(
    file: Path, capsys: Capture, target: str, net: str, none: str
) -> None:
    target = target.replace("FILE", str(file))
    code = "" if ".py" in target else "reference"
    for verb, word in ((sim, "  formula    "), (scale, "formulas: ")):
        size = {"world_size": 4} if verb is sim else {"worlds": (1, 4)}
        verb(target, net=net, size="4KiB", code=code, **size)  # type: ignore[operator]
        said = capsys.readouterr().out
        assert (f"{word}none here; {none}" in said) == bool(none)
        assert ("at least" in said) == (not none)
        assert all(len(line) <= 80 for line in said.splitlines() if word in line)
    assert sim("1.4", world_size=1, net=net, size="4KiB", code="reference") == 0
    assert "formula" not in capsys.readouterr().out


def test_nobody_takes_simulated_time_for_their_own(file: Path, capsys: Capture) -> None:
    page = file.with_name("run.html")
    assert sim(f"{file}:ring", world_size=4, size="4KiB", html=str(page)) == 0
    said = capsys.readouterr().out
    took = "60.49 µs of simulated time"
    assert f"  time       {took}\n" in said
    assert re.search(r"\(simulated in \d+\.\d\d s\)", said)
    assert f"4 ranks finished in {took}" in page.read_text(encoding="utf-8")


def test_the_readme_shows_what_is_printed(file: Path, capsys: Capture) -> None:
    """The times are virtual: they are the same on every machine."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme.split("<!-- begin scale: ")[1].split("<!-- end -->")[0]
    typed, _, block = shown.partition(" -->\n")
    worlds = tuple(int(n) for n in re.findall(r"-n (\d+)", typed))
    assert scale(typed.split()[2], worlds=worlds, code="reference") == 0
    said = capsys.readouterr().out.splitlines()
    assert block.strip().splitlines() == ["```", *said[:-1], "```"]


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("1.99", {}, "no task is called '1.99'"),
        ("collectives", {}, "name one of its tasks: collectives.exchange"),
        ("collectives:nothing", {}, "has no nothing; it has send_recv"),
        ("missing.py:ring", {}, "missing.py cannot be read: No such file"),
        ("FILE:nothing", {}, "algorithms.py has no nothing; it has ring"),
        ("FILE", {}, "algorithms.py needs a function, FILE.py:NAME; it has ring"),
        ("FILE:ring", {"beside": True}, "--beside needs a task: a file has no"),
        ("1.3", {"code": "mine"}, "there is nothing of yours in 1.3"),
        ("FILE:odd", {}, "odd takes weight, and nothing is known to put there"),
        ("FILE:alone", {}, "alone takes no comm"),
        ("1.8", {}, "takes no comm"),
        ("1.4", {"net": "foo"}, 'there is no network "foo"'),
        ("1.4", {"net": "alpha=-1us,bw=1Gbit"}, "alpha"),
        ("1.4", {"fault": "kill=3"}, '"3" has no @'),
        ("1.4", {"fault": "kill=99@1s"}, "99"),
        ("1.4", {"fault": "restart=ps@1s-2s"}, "there is only rank 0 … 63 and store"),
        ("1.4", {"fault": "restart=0@2s"}, "RANK@FROM-TO"),
        ("1.4", {"size": "1MB/s"}, "1MB/s"),
        ("1.4", {"world_size": 0}, "0 ranks: choose between 1 and 4,096"),
        ("1.4", {"world_size": 100_000}, "100000 ranks: choose between 1 and 4,096"),
        ("1.4", {"world_size": 4096, "size": "1GB"}, "choose a smaller --size"),
        ("1.4", {"code": "yours"}, "choose mine or reference"),
    ],
)
def test_bad_input_is_one_sentence(
    file: Path, name: str, options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        sim(name.replace("FILE", str(file)), **options)  # type: ignore[arg-type]
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_python(file: Path) -> None:
    file.write_text("def ring(comm:\n")
    with pytest.raises(ValueError, match="line 1 is not Python"):
        sim(f"{file}:ring")


def test_sizes_and_times_in_words() -> None:
    assert [size_words(n) for n in (5, 1024, 3 << 20)] == ["5 B", "1 KiB", "3 MiB"]
    assert [time_words(s) for s in (2.5, 0.0123, 5e-6)] == ["2.5 s", "12.3 ms", "5 µs"]
