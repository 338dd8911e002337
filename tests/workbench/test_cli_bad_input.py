"""Whatever a learner's file does, the verdict is one true sentence in bounded time."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from distlab.cli.check import check
from distlab.runner import Cluster
from distlab.runner.processes import descendants
from tests.workbench.course import (
    EXCHANGE,
    FOREVER,
    RING_OF_SENDS,
    Course,
    filled,
    keep_warm,
    pristine,
)

TEMPLATE = pristine("collectives")
NAMES = {
    "1.1": "collectives.exchange",
    "1.2": "collectives.pass_around",
    "1.4": "collectives.all_reduce",
}
SECOND_EXCHANGE = "\n\ndef send_recv(comm, tensor):" + EXCHANGE.replace("\n", "\n    ")
Check = Callable[..., tuple[int, str]]


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
    """`distlab check` on warm ranks: its exit code, and what it said."""

    keep_warm(cluster, monkeypatch)

    def judge(
        text: str | bytes, task: str = "1.1", *, untouched: bool = True
    ) -> tuple[int, str]:
        cluster.start()
        cluster.settle()
        before = descendants(os.getpid())
        data = text if isinstance(text, bytes) else text.encode()
        course.template().write_bytes(data)
        code = check([task])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert out == "".join(c for c in out if c.isprintable() or c == "\n")
        for line in out.splitlines():
            assert len(line) <= 80 or "python -m distlab" in line, line
        cluster.settle()
        assert descendants(os.getpid()) == before
        assert not untouched or course.template().read_bytes() == data
        return code, out

    return judge


# ── the file itself ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (TEMPLATE.replace("send_recv(", "send_recv(("), r"line \d+ is not Python"),
        (TEMPLATE.replace("send_recv(", "swap("), "no function send_recv: it was ren"),
        (filled(NAMES["1.1"], "pass") + "\nreturn 3\n", "'return' outside function"),
        ("", "no function send_recv: it is empty"),
        ("def send_recv(\0", "line 1 is not Python: a null byte"),
        ("# café\n".encode("latin-1"), "the file is not UTF-8 text"),
        (filled(NAMES["1.1"], "x = " + "-" * 100_000 + "1"), "nested too deeply"),
        (filled(NAMES["1.1"], "x = " + "+".join("1" * 20_000)), "nested too deeply"),
    ],
)
def test_a_file_that_is_no_program(judged: Check, text: str | bytes, says: str) -> None:
    code, out = judged(text)
    assert code == 1
    assert re.search(says, out)
    assert re.search(r"^  phase1_data_parallel/template_collectives.py(:\d+)?$", out, 8)
    assert "DEADLOCK" not in out


def test_a_file_that_is_gone_can_be_had_back(course: Course, judged: Check) -> None:
    judged(TEMPLATE)
    course.template().unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_bytes", lambda self, data: None)
        code, out = judged(b"", untouched=False)
    assert code == 1
    assert "the file cannot be read: No such file or directory" in out
    assert "distlab reset collectives" in out


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
    code, out = judged(text)
    assert (code, out.splitlines()[0][:8]) == (0, "1.1 PASS")


# ── what it does when it runs ───────────────────────────────────────────────────────


@dataclass(frozen=True)
class Case:
    """The body of a function, and what the verdict on it says."""

    body: str
    says: tuple[str, ...]
    code: int = 1
    task: str = "1.1"
    never: tuple[str, ...] = ()


CASES = {
    "returns None": Case("return None", ("[no-messages]",)),
    "wrong shape": Case(
        EXCHANGE.replace("send(tensor", "send(tensor.repeat(3)"),
        ("rank 0 sends [12] float64, but rank 1 receives into [4] float64",),
        never=("gloo::", "enforce fail"),
    ),
    "wrong dtype": Case(
        EXCHANGE.replace("send(tensor", "send(tensor.float()"),
        ("rank 0 sends [4] float32, but rank 1 receives into [4] float64",),
    ),
    "one rank raises": Case(
        EXCHANGE + "\nif comm.rank == 0:\n    {}['key']",
        ("rank 0 raised KeyError: 'key' at template_collectives.py:", "[raised]"),
    ),
    "a name misspelt": Case(
        "comm.rnak", ("comm has no attribute 'rnak'",), never=("PointToPointOnly",)
    ),
    "an endless message": Case(
        "raise ValueError('word ' * 1000)", ("ValueError: word", "...")
    ),
    "control characters": Case(
        r"raise ValueError('\x1b[2J\udcff\x00 [bold]x[/bold]')",
        (r"\x1b[2J", r"\udcff\x00", "[bold]x[/bold]"),
    ),
    "an exception without words": Case(
        "class X(BaseException):\n    def __str__(self): raise OSError\nraise X",
        ("raised X",),
    ),
    "killed": Case(
        "import os, signal\nif comm.rank == 1:\n    os.kill(os.getpid(), 9)" + EXCHANGE,
        ("rank 1 was killed by SIGKILL", "[rank-died]"),
    ),
    "os._exit(0)": Case("import os\nos._exit(0)", ("exit status 0", "[rank-died]")),
    "sys.exit()": Case("import sys\nsys.exit()", ("raised SystemExit",)),
    "KeyboardInterrupt": Case("raise KeyboardInterrupt", ("KeyboardInterrupt",)),
    "deadlock": Case(
        "if comm.rank < 2:\n    comm.recv(tensor, 1 - comm.rank)",
        ("DEADLOCK  0→1→0 all wait in recv", "[ring-of-recvs]"),
    ),
    "ring of sends": Case(
        RING_OF_SENDS, ("DEADLOCK  0→1→2→0", "[ring-of-sends]", "call #1"), task="1.2"
    ),
    "endless loop": Case(FOREVER, ("TIME", "had not finished after 1 s")),
    "endless sleep": Case("import time\ntime.sleep(1000)", ("[spinning]",)),
    "print flood": Case("while True:\n    print('x' * 99)", ("TIME", "lines more")),
    "output that is no text": Case(
        "import os\nos.write(1, b'\\xff\\x1b[2J\\tab\\n')\nassert False",
        ("[rank 0] �\\x1b[2J", "AssertionError"),
    ),
    "huge tensor": Case(
        "import torch\ntorch.empty(10**13)", ("MEMORY", "[out-of-memory]")
    ),
    "huge object": Case("bytearray(10**13)", ("MEMORY", "MemoryError")),
    "recursion": Case("send_recv(comm, tensor)", ("RecursionError",)),
    "prints the success line": Case(
        "print('1.1 PASS  n = 1, 2, 3, 4, 7')",
        ("1.1 C1 NOT YET", "printed meanwhile:", "[rank 0] 1.1 PASS"),
    ),
    "threads left running": Case(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(999,)).start()" + EXCHANGE,
        ("1.1 PASS",),
        code=0,
    ),
    "a process left running": Case(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(999)"
        + EXCHANGE,
        ("1.1 PASS",),
        code=0,
    ),
    "a program started": Case(
        "import subprocess as s\ns.Popen(['sleep', '999'])" + EXCHANGE,
        ("1.1 ", "NOT YET", "may not"),
    ),
    "closes its output": Case(
        "import sys\nsys.stdout.close()" + EXCHANGE, ("1.1 PASS",), code=0
    ),
    "imports the solutions": Case(
        "from solutions.phase1_data_parallel import collectives as theirs\n"
        "theirs.send_recv(comm, tensor)",
        ("1.1 ",),
        code=-1,  # nobody claims that this is prevented, only that it is survived
    ),
    "a new tensor": Case(
        "received, total = tensor.clone(), tensor.clone()\n"
        "if comm.rank:\n    comm.send(tensor, 0)\n"
        "for src in range(1, comm.world_size if comm.rank == 0 else 1):\n"
        "    comm.recv(received, src)\n    total += received\n"
        "broadcast(comm, total, 0)\nreturn total",
        ("1.4 C2 NOT YET  your return value is right", "[not-in-place]"),
        task="1.4",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_program_that_goes_wrong(course: Course, judged: Check, name: str) -> None:
    case = CASES[name]
    course.set_time_limit(1 if "TIME" in case.says or "sleep" in name else 10)
    code, out = judged(filled(NAMES[case.task], case.body), case.task)
    assert code == case.code or case.code == -1
    one_line = " ".join(out.split())
    for words in case.says:
        assert " ".join(words.split()) in one_line, out
    for words in case.never:
        assert words not in out
    if case.code == 1:
        assert not re.search(r"^1\.\d PASS", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("top", "says"),
    [
        ("import nothing_like_this", "ModuleNotFoundError"),
        ("raise RuntimeError('oh')", "RuntimeError: oh"),
        ("raise SystemExit(0)", "SystemExit"),
    ],
)
def test_a_file_that_breaks_when_imported(judged: Check, top: str, says: str) -> None:
    text = filled(NAMES["1.1"], EXCHANGE)
    code, out = judged(text.replace("import annotations", f"import annotations\n{top}"))
    assert code == 1
    assert says in out
    assert re.search(r"template_collectives\.py:\d+", out)


def test_a_file_that_deletes_itself_stays(course: Course, judged: Check) -> None:
    body = "import os\nif os.path.exists(__file__):\n    os.remove(__file__)"
    code, out = judged(filled(NAMES["1.1"], EXCHANGE + body))
    assert code == 1
    assert "a rank may not change the course's files" in out
    assert course.template().exists()
