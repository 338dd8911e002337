"""Whatever a learner's file does, the verdict is one true sentence in bounded time."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from distlab.cli.check import check
from distlab.grading.report import lines_of
from distlab.grading.verdict import ClauseVerdict, TaskVerdict
from distlab.processes.tree import descendants
from distlab.runner import Cluster
from tests.workbench.course import (
    EXCHANGE,
    FOREVER,
    RING_OF_SENDS,
    Course,
    filled,
    keep_warm,
    pristine,
)
from tests.workbench.golden import Golden

TEMPLATE = pristine("collectives")
NAMES = {
    "1.1": "collectives.exchange",
    "1.2": "collectives.pass_around",
    "1.4": "collectives.all_reduce",
}
SECOND_EXCHANGE = "\n\ndef send_recv(comm, tensor):" + EXCHANGE.replace("\n", "\n    ")


@dataclass(frozen=True)
class Judged:
    """How `distlab check` ended, what it printed, and the verdict in that."""

    code: int
    out: str
    verdict: TaskVerdict

    @property
    def failed(self) -> ClauseVerdict:
        """The first clause that is not fulfilled."""
        return next(c for c in self.verdict.clauses if c.status == "fail")


Check = Callable[..., Judged]


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    own = Course(tmp_path)
    monkeypatch.chdir(own.root)
    monkeypatch.setenv("DISTLAB_STATE", str(own.state))
    return own


@pytest.fixture
def judged(
    course: Course,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Check:
    """`distlab check` on warm ranks."""

    keep_warm(cluster, monkeypatch)
    told: list[TaskVerdict] = []

    def noted(verdict: TaskVerdict) -> list[tuple[str, str]]:
        told.append(verdict)
        return lines_of(verdict)

    monkeypatch.setattr("distlab.cli.check.lines_of", noted)

    def judge(
        text: str | bytes, task: str = "1.1", *, untouched: bool = True
    ) -> Judged:
        cluster.start()
        cluster.settle()
        before = descendants(os.getpid())
        data = text if isinstance(text, bytes) else text.encode()
        course.template().write_bytes(data)
        code = check([task])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert out == "".join(c for c in out if c.isprintable() or c == "\n")
        cluster.settle()
        assert descendants(os.getpid()) == before
        assert not untouched or course.template().read_bytes() == data
        return Judged(code, out, told.pop())

    return judge


# ── the file itself ─────────────────────────────────────────────────────────────────


RETURNS = filled(NAMES["1.1"], "pass") + "\nreturn 3\n"
NO_PROGRAMS: list[tuple[str | bytes, str, str]] = [
    (TEMPLATE.replace("send_recv(", "send_recv(("), "syntax-error", r"^line \d+\b"),
    (TEMPLATE.replace("send_recv(", "swap("), "renamed", r"\bsend_recv\b"),
    (RETURNS, "syntax-error", rf"^line {RETURNS.count(chr(10))}\b"),
    ("", "renamed", r"\bsend_recv\b"),
    ("def send_recv(\0", "syntax-error", r"^line 1\b"),
    ("# café\n".encode("latin-1"), "", r"\bUTF-8\b"),
    (filled(NAMES["1.1"], "x = " + "-" * 100_000 + "1"), "", ""),
    (filled(NAMES["1.1"], "x = " + "+".join("1" * 20_000)), "", ""),
]


def test_a_file_that_is_no_program(judged: Check, golden: Golden) -> None:
    told = []
    for text, slug, named in NO_PROGRAMS:
        done = judged(text)
        assert (done.code, done.verdict.status) == (1, "fail")
        assert done.verdict.slug == slug
        assert re.search(named, done.failed.message)
        assert re.search(r"^  phase1\S+/template_collectives\.py(:\d+)?$", done.out, 8)
        # Python's own words and the length of the template are not ours to hold.
        told.append(
            re.sub(r"^line \d+( [^:]*): .*", r"line N\1: …", done.failed.message)
        )
    golden("cli/no-program", "\n".join(told))


def test_a_file_that_is_gone_can_be_had_back(course: Course, judged: Check) -> None:
    judged(TEMPLATE)
    course.template().unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_bytes", lambda self, data: None)
        done = judged(b"", untouched=False)
    assert done.code == 1
    assert done.failed.message.endswith(os.strerror(errno.ENOENT))
    assert re.search(r"distlab reset collectives\b", done.out)


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + filled(NAMES["1.1"], EXCHANGE),
        filled(NAMES["1.1"], EXCHANGE).replace("\n", "\r\n"),
        filled(NAMES["1.1"], EXCHANGE).replace("    ", "\t"),
        TEMPLATE + SECOND_EXCHANGE,  # the later one counts
        filled(NAMES["1.1"], EXCHANGE).replace('"""Copy', '"""\\d Copy'),
    ],
    ids=["byte-order mark", "CRLF", "tabs", "defined twice", "odd escape"],
)
def test_an_unusual_file_is_as_good_as_any(judged: Check, text: str) -> None:
    done = judged(text)
    assert (done.code, done.verdict.status) == (0, "pass")


# ── what it does when it runs ───────────────────────────────────────────────────────


@dataclass(frozen=True)
class Case:
    """The body of a function, the verdict's slug and kind, and what it must name."""

    body: str
    slug: str = ""
    named: str = ""
    kind: str = "NOT YET"
    clause: str = "C1"
    task: str = "1.1"
    printed: tuple[str, ...] = ()


CASES = {
    "returns None": Case("return None", "no-messages", r"\brank 1\b"),
    "wrong shape": Case(
        EXCHANGE.replace("send(tensor", "send(tensor.repeat(3)"),
        "mismatched-buffers",
        r"^rank 0 .*\[12\] float64\b.*\brank 1 .*\[4\] float64$",
    ),
    "wrong dtype": Case(
        EXCHANGE.replace("send(tensor", "send(tensor.float()"),
        "mismatched-buffers",
        r"^rank 0 .*\[4\] float32\b.*\brank 1 .*\[4\] float64$",
    ),
    "one rank raises": Case(
        EXCHANGE + "\nif comm.rank == 0:\n    {}['key']",
        "raised",
        r"^rank 0 .*\bKeyError .*\btemplate_collectives\.py:\d+: 'key'$",
    ),
    "a name misspelt": Case(
        "comm.rnak", "raised", r"\bAttributeError .*: comm [^P]*'rnak'"
    ),
    "an endless message": Case(
        "raise ValueError('word ' * 1000)", "raised", r"\bValueError .*: word .*\.\.\."
    ),
    "control characters": Case(
        r"raise ValueError('\x1b[2J\udcff\x00 [bold]x[/bold]')",
        "raised",
        printed=(r"\x1b[2J", r"\udcff\x00", "[bold]x[/bold]"),
    ),
    "an exception without words": Case(
        "class X(BaseException):\n    def __str__(self): raise OSError\nraise X",
        "raised",
        r"\bX\b.*\bOSError\b",
    ),
    "killed": Case(
        "import os, signal\nif comm.rank == 1:\n    os.kill(os.getpid(), 9)" + EXCHANGE,
        "rank-died",
        r"^rank 1 .*\bSIGKILL\b",
    ),
    "os._exit(0)": Case("import os\nos._exit(0)", "rank-died", r"\bstatus 0\b"),
    "sys.exit()": Case("import sys\nsys.exit()", "raised", r"\bSystemExit\b"),
    "KeyboardInterrupt": Case("raise KeyboardInterrupt", "raised", "KeyboardInterrupt"),
    "deadlock": Case(
        "if comm.rank < 2:\n    comm.recv(tensor, 1 - comm.rank)",
        "ring-of-recvs",
        r"^ranks 0 and 1 wait\b",
        kind="DEADLOCK",
    ),
    "ring of sends": Case(
        RING_OF_SENDS,
        "ring-of-sends",
        r"^ranks 0→1→2→0\b",
        kind="DEADLOCK",
        task="1.2",
        printed=("[ring-of-sends]", "#1"),
    ),
    "endless loop": Case(FOREVER, "spinning", r"\b1 s\b", kind="TIME"),
    "print flood": Case(
        "while True:\n    print('x' * 99)", "spinning", r"\b1 s\b", kind="TIME"
    ),
    "output that is no text": Case(
        "import os\nos.write(1, b'\\xff\\x1b[2J\\tab\\n')\nassert False",
        "raised",
        r"\bAssertionError\b",
        printed=("[rank 0] �\\x1b[2J",),
    ),
    "huge tensor": Case(
        "import torch\ntorch.empty(10**13)", "out-of-memory", kind="MEMORY"
    ),
    "huge object": Case(
        "bytearray(10**13)", "out-of-memory", "MemoryError", kind="MEMORY"
    ),
    "recursion": Case("send_recv(comm, tensor)", "raised", "RecursionError"),
    "prints the success line": Case(
        "print('1.1 PASS  n = 1, 2, 3, 4, 7')",
        "no-messages",
        printed=("1.1 C1 NOT YET", "[rank 0] 1.1 PASS"),
    ),
    "a program started": Case(
        "import subprocess as s\ns.Popen(['sleep', '999'])" + EXCHANGE,
        "raised",
        r"\bForbiddenError\b.*'sleep'",
    ),
    "imports the solutions": Case(
        "from solutions.phase1_data_parallel import collectives as theirs\n"
        "theirs.send_recv(comm, tensor)",
        "raised",
        r"\bForbiddenError\b.*\bsolutions/",
    ),
    "deletes itself": Case(
        "import os\nif os.path.exists(__file__):\n    os.remove(__file__)",
        "raised",
        r"\bForbiddenError\b.*\btemplate_collectives\.py\b",
    ),
    "a new tensor": Case(
        "received, total = tensor.clone(), tensor.clone()\n"
        "if comm.rank:\n    comm.send(tensor, 0)\n"
        "for src in range(1, comm.world_size if comm.rank == 0 else 1):\n"
        "    comm.recv(received, src)\n    total += received\n"
        "broadcast(comm, total, 0)\nreturn total",
        "not-in-place",
        clause="C2",
        task="1.4",
    ),
}
PASSING = {
    "threads left running": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(999,)).start()" + EXCHANGE,
    "a process left running": "import os, time\n"
    "if os.fork() == 0:\n    os.setsid()\n    time.sleep(999)" + EXCHANGE,
    "closes its output": "import sys\nsys.stdout.close()" + EXCHANGE,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_program_that_goes_wrong(course: Course, judged: Check, name: str) -> None:
    case = CASES[name]
    course.set_time_limit(1 if case.kind == "TIME" else 10)
    done = judged(filled(NAMES[case.task], case.body), case.task)
    assert (done.code, done.verdict.status) == (1, "fail")
    failed = done.failed
    assert (failed.id, failed.kind, failed.slug) == (case.clause, case.kind, case.slug)
    assert re.search(case.named, failed.message), failed.message
    one_line = " ".join(done.out.split())
    assert all(text in one_line for text in case.printed), done.out
    assert not re.search(r"^1\.\d PASS", done.out, re.MULTILINE)
    assert len(done.out.splitlines()) <= 24  # however much it says or prints


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSING)
def test_a_program_that_leaves_something_behind(judged: Check, name: str) -> None:
    done = judged(filled(NAMES["1.1"], PASSING[name]))
    assert (done.code, done.verdict.status) == (0, "pass")


@pytest.mark.parametrize(
    ("top", "error"),
    [
        ("import nothing_like_this", "ModuleNotFoundError .*nothing_like_this"),
        ("raise RuntimeError('oh')", "RuntimeError .*oh"),
        ("raise SystemExit(0)", "SystemExit .*0"),
    ],
)
def test_a_file_that_breaks_when_imported(judged: Check, top: str, error: str) -> None:
    text = filled(NAMES["1.1"], EXCHANGE)
    done = judged(text.replace("import annotations", f"import annotations\n{top}"))
    assert done.code == 1
    assert re.search(error, done.failed.message)
    assert re.search(r"template_collectives\.py:\d+\b", done.failed.message)
