"""The rules a rank is held to, one event at a time; and forms that are no solution.

The hook itself cannot be taken off again, so it is put on in ranks only: see
test_hostile.py for the whole of it.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distlab.grading.guard import (
    MAX_FORKS,
    MAX_SHARED_BYTES,
    ForbiddenError,
    _Guard,
    _history,
    resolved,
)
from distlab.grading.static_checks import flaw_in, not_a_def
from distlab.processes.tree import is_stopped
from distlab.runner.incoming import record_in
from distlab.runner.wire import encode
from tests.workbench.golden import Golden

Hook = Callable[..., None]


@pytest.fixture
def course(tmp_path: Path) -> Path:
    (tmp_path / "course" / "solutions").mkdir(parents=True)
    (tmp_path / "course" / "rank0").mkdir()
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "course"


@pytest.fixture
def hook(course: Path, monkeypatch: pytest.MonkeyPatch) -> Hook:
    monkeypatch.chdir(course / "rank0")
    guard = _Guard([str(course)], [str(course / "solutions")])
    return lambda event, *values: guard.hook(event, values)


W = os.O_WRONLY
REFUSED: list[tuple[str, tuple[Any, ...], str]] = [
    ("open", ("{course}/x", "w", 0), "x: "),
    ("open", ("{course}/x", "r+", 0), "x: "),
    ("open", ("{course}/x", None, W), "x: "),
    ("open", ("../x", "a", 0), "x: "),
    ("open", (b"../x", "a", 0), "x: "),
    (
        "open",
        ("{course}/solutions/a.py", "r", 0),
        "solutions/a.py: ",
    ),
    ("open", ("../solutions/a.py", "rb", 0), "solutions/a.py: "),
    ("os.remove", ("{course}/x", -1), "x: "),
    ("os.rename", ("here", "{course}/x", -1, -1), "x: "),
    ("os.rename", ("{course}/x", "here", -1, -1), "x: "),
    ("os.symlink", ("here", "{course}/x", -1), "x: "),
    ("os.mkdir", ("{course}/new", 0o777, -1), "new: "),
    ("shutil.rmtree", ("{course}", None), ""),
    ("open", ("{course}", None, os.O_RDONLY), ""),
    ("open", ("/", None, os.O_RDONLY), "/: "),
    ("sqlite3.connect", ("{course}/x",), "x: "),
    ("os.kill", (1, 9), "process 1"),
    ("os.kill", (-1, 9), ""),
    ("os.killpg", (1, 9), ""),
    ("os.system", (b"ls",), "b'ls'"),
    ("subprocess.Popen", ("ls", [], None, None), "'ls'"),
    ("socket.connect", (None, ("localhost", 1)), "(socket.connect)"),
    ("socket.bind", (None, ("localhost", 1)), "(socket.bind)"),
    ("socket.sendmsg", (None, ("localhost", 1)), "(socket.sendmsg)"),
    ("resource.setrlimit", (2, (1, 1)), ""),
    ("mmap.__new__", (-1, 20 << 30, 0, 0), "20 GiB"),
]
ALLOWED: list[tuple[str, tuple[Any, ...]]] = [
    ("open", ("{course}/x", "r", 0)),
    ("open", ("notes.txt", "w", W)),
    ("open", ("{course}/../elsewhere/x", "w", W)),
    ("open", ("/dev/null", "w", W)),
    ("open", (7, "w", W)),
    ("os.remove", ("notes.txt", -1)),
    ("os.symlink", ("{course}", "here", -1)),
    ("os.kill", (os.getpid(), 0)),
    ("os.kill", (0, 0)),
    ("mmap.__new__", (-1, MAX_SHARED_BYTES, 0, 0)),
    ("import", ("torch", None, None, None, None)),
    ("socket.connect_nothing", ()),
    ("socket.sendmsg", (None, None)),  # a line that is there: comm's own
]


def placed(course: Path, values: tuple[Any, ...]) -> list[Any]:
    return [
        v.replace("{course}", str(course)) if isinstance(v, str) else v for v in values
    ]


def test_what_a_rank_may_not_do_is_refused(
    hook: Hook, course: Path, golden: Golden
) -> None:
    said = []
    for event, values, named in REFUSED:
        with pytest.raises(ForbiddenError) as caught:
            hook(event, *placed(course, values))
        assert named in str(caught.value)
        said.append(f"{event}: {caught.value}")
    golden("grading/refused_by_the_guard", "\n".join(said))


@pytest.mark.parametrize(("event", "values"), ALLOWED)
def test_what_a_rank_may_do_is_let_through(
    hook: Hook, course: Path, event: str, values: tuple[Any, ...]
) -> None:
    hook(event, *placed(course, values))


def test_a_folder_that_is_open_gives_no_way_round(hook: Hook, course: Path) -> None:
    folder = os.open(course, os.O_RDONLY)
    try:
        with pytest.raises(ForbiddenError):
            hook("os.remove", "x", folder)
    finally:
        os.close(folder)


@pytest.mark.parametrize(
    "name", ["stack0", "store", "rank1", "rank1/x", "service0/disk/log", ""]
)
def test_the_files_of_the_run_are_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "run" / "rank0").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run" / "rank0")
    guard = _Guard([], [])
    with pytest.raises(ForbiddenError, match=rf"^\S*{name or '/run'}: "):
        guard.hook("os.remove", (str(tmp_path / "run" / name), -1))
    for free in ("rank0", "rank0/x", "box.pt", "stack"):
        guard.hook("os.remove", (str(tmp_path / "run" / free), -1))


def test_only_the_doors_of_the_run_are_connected_to(hook: Hook) -> None:
    guard = _Guard([], [], [("127.0.0.1", 4711)])
    guard.hook("socket.connect", (None, ("127.0.0.1", 4711)))
    for event, address in (
        ("socket.connect", ("127.0.0.1", 4712)),
        ("socket.connect", ("127.0.0.2", 4711)),
        ("socket.connect", "/run/some.socket"),
        ("socket.bind", ("127.0.0.1", 4711)),
        ("socket.sendto", ("127.0.0.1", 4711)),
    ):
        with pytest.raises(ForbiddenError, match=re.escape(f"({event})")):
            guard.hook(event, (None, address))


def test_the_history_is_where_git_keeps_it(tmp_path: Path) -> None:
    assert _history(tmp_path) == [tmp_path / ".git"]
    part = tmp_path / "main" / ".git" / "worktrees" / "one"
    part.mkdir(parents=True)
    (part / "commondir").write_text("../..\n")
    tree = tmp_path / "one"
    tree.mkdir()
    (tree / ".git").write_text(f"gitdir: {part}\n")
    found = [os.path.realpath(path) for path in _history(tree)]
    assert found == [str(tree / ".git"), str(tmp_path / "main" / ".git")]
    (part / "commondir").unlink()
    assert _history(tree) == [tree / ".git"]


def test_forks_are_counted_and_come_to_an_end(hook: Hook) -> None:
    for _ in range(MAX_FORKS):
        hook("os.fork")
    with pytest.raises(ForbiddenError, match=rf"^{MAX_FORKS}\b"):
        hook("os.fork")


def test_a_process_is_stopped_or_it_is_not() -> None:
    assert not is_stopped(os.getpid())
    assert not is_stopped(1 << 30)


# ── lines from ranks ────────────────────────────────────────────────────────────────

EXIT = {"k": "exit", "n": 3, "t": 0.5}
RAISED = {
    "k": "raised",
    "type": "KeyError",
    "message": "'x'",
    "refused": "",
    "peer_lost": False,
    "frames": [("a.py", 3)],
}


ENTER = {
    "k": "enter",
    "n": 1,
    "t": 0.5,
    "op": "send",
    "group": "world",
    "tag": 0,
    "members": [0, 1],
    "dst": 1,
    "src": None,
    "root": None,
    "reduce": None,
    "shape": [2],
    "dtype": "float32",
    "into_shape": None,
    "into_dtype": None,
    "bytes": 8,
    "ptr": 1,
    "file": "a.py",
    "line": 3,
    "via": ["a.py", 9],
    "timeout_s": None,
    "thread": 1,
    "threads": 1,
}


@pytest.mark.parametrize(
    "record", [EXIT, RAISED, ENTER, {"k": "report", "value": None}]
)
def test_a_whole_record_is_taken(record: dict[str, Any]) -> None:
    assert record_in(encode(record)) == record


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"7",
        b"\xff\xfe",
        b'{"k": 7}',
        b'{"k": "unheard of"}',
        b'{"k": "exit"}',
        b'{"k": "exit", "n": []}',
        b'{"k": "result", "value": 1}',
        b'{"k": "enter", "n": 1, "op": "send"}',
        b'{"~tensor": [1]}',
        encode({**RAISED, "frames": [7]}),
        encode({**RAISED, "frames": [("a.py", "3")]}),
        encode({**RAISED, "message": None}),
        encode({**ENTER, "dst": "1"}),
        encode({**ENTER, "t": None}),
        encode({**ENTER, "timeout_s": "x"}),
        encode({**ENTER, "members": ["x"]}),
        encode({**ENTER, "shape": ["x"]}),
        encode({**ENTER, "via": 7}),
        encode({key: value for key, value in ENTER.items() if key != "src"}),
    ],
)
def test_anything_less_is_no_record(line: bytes) -> None:
    assert record_in(line) is None


# ── forms that are no solution ──────────────────────────────────────────────────────

REFERENCE = "def f(comm):\n    return 1\nclass T:\n    def g(self):\n        yield 1\n"


IN_PLACE = [
    ("async def f(): pass", "f"),
    ("class f: pass", "f"),
    ("f = lambda: 1", "f"),
    ("f: object = print", "f"),
    ("class T:\n    g = print", "T.g"),
]
FLAWS = [
    ("def f(comm):\n    yield", 2, "f "),
    ("def f(comm):\n    if 1:\n        yield from ()", 3, "f "),
    ("def f(comm):\n    comm._inner.send()", 2, "comm._inner"),
    ("def f(self):\n    self.comm._x", 2, "comm._x"),
]


def test_what_stands_in_place_of_a_function_is_named(golden: Golden) -> None:
    said = [not_a_def(ast.parse(text), name) for text, name in IN_PLACE]
    for text, (_, name) in zip(said, IN_PLACE, strict=True):
        assert text.startswith(f"{name[-1]} is ")
    assert len(set(said)) == 4  # two are assigned in the same way
    golden("grading/no_functions", "\n".join(said))


@pytest.mark.parametrize(("text", "name"), [("def h(): pass", "f"), ("", "T.g")])
def test_nothing_stands_in_place_of_a_function(text: str, name: str) -> None:
    assert not_a_def(ast.parse(text), name) == ""


def test_a_flaw_that_the_file_shows_is_named_with_its_line(golden: Golden) -> None:
    said = []
    for text, line, named in FLAWS:
        said.append(flaw_in(ast.parse(text), ast.parse(REFERENCE), ["f", "T.g"]))
        assert said[-1].startswith(f"line {line}: ")
        assert named in said[-1]
    golden("grading/flaws_in_the_file", "\n".join(said))


@pytest.mark.parametrize(
    "text",
    [
        "def f(comm):\n    def inner():\n        yield\n    inner()",
        "def f(comm):\n    comm.rank, comm.__class__, self._x",
        "class T:\n    def g(self):\n        yield 2",
    ],
)
def test_a_file_may_show_no_flaw(text: str) -> None:
    assert flaw_in(ast.parse(text), ast.parse(REFERENCE), ["f", "T.g"]) == ""


def test_the_rules_name_real_paths_and_the_history(tmp_path: Path) -> None:
    course, link = tmp_path / "course", tmp_path / "link"
    course.mkdir()
    link.symlink_to(course)
    assert resolved([str(link)], [f"{link}/solutions"]) == {
        "course": [str(course)],
        "secrets": [f"{course}/solutions", f"{course}/.git"],
    }
