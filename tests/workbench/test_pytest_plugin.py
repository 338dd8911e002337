"""`@pytest.mark.ranks(4)`: the plugin, tried on a suite with planted mistakes.

The suite runs in a pytest of its own, as a user's would, and reports as JUnit's XML.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from distlab.pytest_plugin import MARK, THIS_RANK
from distlab.pytest_plugin.job import Setting, wanted
from distlab.pytest_plugin.told import Result, conclude
from tests.workbench.course import ROOT
from tests.workbench.golden import Golden

PLUGIN = "distlab.pytest_plugin"
CONFTEST = """\
import threading
import pytest

@pytest.fixture
def lock(): return threading.Lock()

@pytest.fixture
def settings(monkeypatch):
    monkeypatch.setenv("OF_THE_FIXTURE", "reaches the ranks")
"""
SUITE = """\
import os
import time
import pytest
import torch
import torch.distributed as dist

@pytest.mark.ranks(3)
@pytest.mark.parametrize("factor", [2, 5])
def test_sum(rank, world_size, factor, tmp_path, settings):
    tensor = torch.tensor([rank * factor])
    dist.all_reduce(tensor)
    assert (tensor.item(), world_size) == (3 * factor, dist.get_world_size())
    assert os.environ["OF_THE_FIXTURE"]
    (tmp_path / str(rank)).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 3

@pytest.mark.ranks(2)
class TestMethods:
    def setup_method(self):
        self.value = 7

    def test_method(self, rank):
        assert self.value == 7

def test_without_ranks():
    assert "RANK" not in os.environ

@pytest.mark.ranks(4)
def test_ends_early(rank):
    for _ in range(2 if rank == 3 else 3):
        dist.all_reduce(torch.ones(3))  # line: all_reduce

@pytest.mark.ranks(2)
def test_mismatch(rank):
    if rank == 0:
        dist.barrier()  # line: barrier
    else:
        dist.all_reduce(torch.ones(3))  # line: other

@pytest.mark.ranks(2)
def test_receive(rank):
    dist.recv(torch.ones(3), 1 - rank)  # line: recv

@pytest.mark.ranks(3)
def test_assert(rank):
    print("printed on", rank)
    if rank > 0:
        assert {"rank": rank} == {"rank": 0}  # line: assert
    dist.barrier()  # line: left

@pytest.mark.ranks(2)
def test_exit(rank):
    if rank == 1:
        os._exit(3)
    time.sleep(30)

@pytest.mark.ranks(2, timeout=3)
def test_endless(rank):
    while rank == 1:
        time.sleep(0.1)  # line: endless
    dist.barrier()

@pytest.mark.ranks(2)
def test_lock(rank, lock): pass

@pytest.mark.ranks(2)
def test_monkeypatch(rank, monkeypatch): pass

@pytest.mark.ranks("many")
def test_many(rank): pass

@pytest.mark.ranks(2)
async def test_coroutine(rank): pass

def test_rank_alone(rank): pass

@pytest.fixture
def doubled(rank): return 2 * rank

@pytest.mark.ranks(2)
def test_fixture_of_rank(doubled): pass

@pytest.mark.ranks(2)
def test_skip(rank):
    if rank == 1:
        pytest.skip("not here")

@pytest.mark.ranks(8, simulated=True)
def test_simulated(rank, world_size):
    tensor = torch.tensor([rank])
    dist.all_reduce(tensor)
    assert (tensor.item(), world_size) == (28, 8)

@pytest.mark.ranks(4, simulated=True)
def test_simulated_ends_early(rank):
    if rank != 2:
        dist.all_reduce(torch.ones(3))  # line: simulated

@pytest.mark.ranks(4, simulated=True)
def test_simulated_assert(rank):
    print("printed on", rank)
    assert rank != 2  # line: simulated assert
"""


@dataclass
class Report:
    """How each test of a suite ended, why, and what it printed."""

    outcomes: dict[str, str]
    texts: dict[str, str]
    printed: dict[str, str]
    code: int
    output: str


def run_suite(folder: Path, *flags: str, plugins: tuple[str, ...] = ()) -> Report:
    (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (folder / "test_planted.py").write_text(SUITE, encoding="utf-8")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "DISTLAB_"))
    }
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    environment["PYTHONPATH"] = str(ROOT)
    named = [f"-p{name}" for name in (PLUGIN, *plugins)]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", *named, "--strict-markers"),
            *("-pno:cacheprovider", "--junitxml=report.xml", "-ojunit_logging=all"),
            *flags,
        ],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    cases = list(ElementTree.parse(folder / "report.xml").iter("testcase"))
    outcomes, texts, printed = {}, {}, {}
    for case in cases:
        ends = [part for part in case if not part.tag.startswith("system-")]
        name = case.get("name", "")
        outcomes[name] = ends[0].tag if ends else "passed"
        texts[name] = "\n".join(part.text or "" for part in ends)
        printed[name] = "\n".join(part.text or "" for part in case if part not in ends)
    return Report(outcomes, texts, printed, done.returncode, done.stdout + done.stderr)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return run_suite(tmp_path_factory.mktemp("suite"))


def line_of(mark: str) -> str:
    lines = SUITE.splitlines()
    number = 1 + next(n for n, line in enumerate(lines) if line.endswith(mark))
    return f"test_planted.py:{number}"


def rows(text: str) -> dict[int, str]:
    """The rows of a report's table by rank."""
    found = re.findall(r"^(\d+)  (.*)$", text, re.MULTILINE)
    return {int(rank): row for rank, row in found}


@pytest.mark.slow
def test_bodies_run_on_their_ranks_with_their_arguments(report: Report) -> None:
    passed = {name for name, how in report.outcomes.items() if how == "passed"}
    assert passed == {
        *("test_sum[2]", "test_sum[5]", "test_method", "test_without_ranks"),
        "test_simulated",
    }
    assert report.code == pytest.ExitCode.TESTS_FAILED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "lines"),
    [
        ("test_ends_early", ["all_reduce"] * 4),
        ("test_mismatch", [": barrier", "other"]),
        ("test_receive", ["recv", "recv"]),
    ],
)
def test_a_hang_is_a_failure_with_ranks_and_lines(
    report: Report, test: str, lines: list[str], golden: Golden
) -> None:
    assert report.outcomes[test] == "failure"
    text = report.texts[test]
    assert {rank: row.split()[-1] for rank, row in rows(text).items()} == {
        rank: line_of(mark) for rank, mark in enumerate(lines)
    }
    golden(f"pytest/{test}", text)


@pytest.mark.slow
def test_failed_asserts_are_shown_once_with_their_ranks(report: Report) -> None:
    text = report.texts["test_assert"]
    assert report.outcomes["test_assert"] == "failure"
    assert "ranks 1–2" in text
    assert text.count("{'rank': 1} == {'rank': 0}") >= 1  # pytest's rewriting
    assert line_of(": assert") in text
    assert f"({line_of('left')})" in text  # where rank 0 was
    for rank in range(3):
        assert f"printed on {rank}" in report.printed["test_assert"]


@pytest.mark.slow
def test_a_process_that_ends_early_is_a_failure(report: Report) -> None:
    assert report.outcomes["test_exit"] == "failure"
    assert re.search(r"rank 1\b.*\b3\b", report.texts["test_exit"])


@pytest.mark.slow
def test_at_the_timeout_every_rank_is_shown(report: Report) -> None:
    text, printed = report.texts["test_endless"], report.printed["test_endless"]
    assert report.outcomes["test_endless"] == "failure"
    assert set(rows(text)) == {0, 1}
    assert f"line {line_of('endless').rpartition(':')[2]} in test_endless" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "named"),
    [
        ("test_lock", "'lock'"),
        ("test_monkeypatch", "'monkeypatch'"),
        ("test_many", "'many'"),
        ("test_coroutine", "test_coroutine"),
        ("test_rank_alone", "rank"),
        ("test_fixture_of_rank", "rank"),
    ],
)
def test_what_cannot_run_on_ranks_is_refused(
    report: Report, test: str, named: str
) -> None:
    assert report.outcomes[test] in ("failure", "error")
    assert named in report.texts[test]
    assert "Traceback" not in report.texts[test]


@pytest.mark.slow
def test_a_skip_on_a_rank_skips_the_test(report: Report) -> None:
    assert report.outcomes["test_skip"] == "skipped"


@pytest.mark.slow
def test_simulated_ranks_fail_in_the_same_way(report: Report) -> None:
    text = report.texts["test_simulated_ends_early"]
    assert set(rows(text)) == {0, 1, 2, 3}
    assert rows(text)[0].endswith(line_of(": simulated"))
    text = report.texts["test_simulated_assert"]
    assert line_of("simulated assert") in text
    assert "printed on 2" in report.printed["test_simulated_assert"]


@pytest.mark.slow
def test_under_xdist_as_well_and_nothing_is_left(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    suite = tmp_path / "suite"
    suite.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        flags = ("-n2", "-k", "sum or ends_early or exit", "-s")
        report = run_suite(suite, *flags, plugins=("xdist",))
    assert report.outcomes == {
        "test_sum[2]": "passed",
        "test_sum[5]": "passed",
        "test_ends_early": "failure",
        "test_simulated_ends_early": "failure",
        "test_exit": "failure",
    }
    assert [p.name for p in temporary.iterdir() if "distlab" in p.name] == []
    assert list(left_in(suite)) == []


def left_in(folder: Path) -> Iterator[int]:
    """Processes whose working folder this is."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            inside = os.readlink(entry / "cwd") == str(folder)
        except OSError:
            continue
        if inside:
            yield int(entry.name)


# ── without processes ───────────────────────────────────────────────────────────────


def ranks(*args: Any, **kwargs: Any) -> pytest.Mark:
    """A marker as the plugin sees it; this session need not have the plugin."""
    return SimpleNamespace(args=args, kwargs=kwargs)  # type: ignore[return-value]


def test_the_entry_point_is_a_module_that_imports_pytest_only() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"distlab": PLUGIN}
    program = (
        f"import sys, pytest; before = set(sys.modules); import {PLUGIN}; "
        "print(*sorted(set(sys.modules) - before))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert loaded == ["distlab", PLUGIN]


@pytest.mark.parametrize(
    ("mark", "setting"),
    [
        (ranks(4), Setting(world_size=4, simulated=False, timeout_s=300)),
        (
            ranks(512, simulated=True, timeout=2.5),
            Setting(world_size=512, simulated=True, timeout_s=2.5),
        ),
    ],
)
def test_the_marker_says_what_is_wanted(mark: pytest.Mark, setting: Setting) -> None:
    assert wanted(mark, "300") == setting


@pytest.mark.parametrize(
    "mark",
    [
        ranks(),
        ranks(0),
        ranks(65),
        ranks(True),
        ranks(2, 4),
        ranks(2, size=4),
        ranks(2, timeout=0),
        ranks(2, timeout="long"),
    ],
)
def test_a_marker_that_means_nothing_is_refused(mark: pytest.Mark) -> None:
    with pytest.raises(pytest.fail.Exception, match=MARK):
        wanted(mark, "300")


class Item:
    """As much of a test as `conclude` needs."""

    class config:  # noqa: N801
        class option:  # noqa: N801
            capture = "fd"

    def __init__(self) -> None:
        self.sections: list[tuple[str, str, str]] = []

    def add_report_section(self, *section: str) -> None:
        self.sections.append(section)  # type: ignore[arg-type]


def failed(line: int, message: str = "assert 1 == 2") -> dict[str, object]:
    return {
        "outcome": "failed",
        "type": "AssertionError",
        "message": message,
        "frames": [("test_a.py", line)],
        "traceback": f"E   {message}\n\ntest_a.py:{line}: AssertionError",
    }


def test_failures_are_grouped_by_their_lines(golden: Golden) -> None:
    result = Result(
        world_size=6,
        ends={0: failed(5), 1: failed(9), 2: failed(5), 3: failed(5, "assert 3 == 2")},
        lost={4: "its process was ended by SIGSEGV"},
        waiting={5: "was waiting in barrier (test_a.py:12)"},
        output={0: "", 1: "a line\n"},
    )
    item = Item()
    with pytest.raises(pytest.fail.Exception) as caught:
        conclude(item, result)  # type: ignore[arg-type]
    assert item.sections == [("call", "stdout of rank 1", "a line\n")]
    golden("pytest/failures", str(caught.value))


def test_all_passed_is_no_exception() -> None:
    passed = {"outcome": "passed"}
    conclude(Item(), Result(world_size=2, ends={0: passed, 1: passed}))  # type: ignore[arg-type]
    assert "rank" in repr(THIS_RANK)
