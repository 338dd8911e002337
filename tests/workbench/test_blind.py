"""Blind sets: how they are read, and what the report counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distlab.cli.blind import blind
from distlab.grading.blind import BlindSetError, read_set
from tests.workbench.judging import CURRICULUM

TASK = "ring_allreduce.chunk_bounds.toml"
RIGHT = '''
[[solution]]
right = "the longer chunks come first"
function = "chunk_bounds"
imports = "import operator"
code = """
def chunk_bounds(length, num_chunks):
    short, more = divmod(length, num_chunks)
    starts = [number * short + min(number, more) for number in range(num_chunks)]
    ends = [*starts[1:], length]
    return [(operator.index(a), operator.index(b)) for a, b in zip(starts, ends)]
"""
'''
WRONG = """
[[solution]]
wrong = "each chunk is one element longer"
why = "C1: the chunks overlap"
change = [["length * number //", "(length + 1) * number //"]]
"""
HARMLESS = """
[[solution]]
wrong = "it isn't wrong at all"
why = "C1"
change = [["pairwise(edges)", "pairwise([*edges])"]]
"""


def write(folder: Path, *solutions: str) -> Path:
    (folder / TASK).write_text("".join(solutions), encoding="utf-8")
    return folder


def test_a_set_is_judged_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path, WRONG, HARMLESS, RIGHT)
    assert blind(folder, seeds=2, as_json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["unlike_verdicts"] == 0
    assert (report["wrong"], report["wrong_rejected"]) == (2, 1)
    assert (report["right"], report["right_accepted"]) == (1, 1)
    statuses = [row["status"] for row in report["solutions"]]
    assert statuses == ["fail", "pass", "pass"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[[solution]]\nwrong = 'a'\nright = 'b'\n",
        "[[solution]]\nwrong = 'a'\nwhat = 'b'\n",
        "[[solution]]\nwrong = 'a'\nchange = [['nowhere', '']]\n",
        "[[solution]]\nwrong = 'a'\nfunction = 'nowhere'\ncode = 'def f(): ...'\n",
        "[[solution]]\nwrong = 'a'\nchange = [['pairwise(edges)', '(']]\n",
        "[[",
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(BlindSetError):
        read_set(CURRICULUM, write(tmp_path, text))


def test_a_task_must_exist(tmp_path: Path) -> None:
    (tmp_path / "ring_allreduce.nothing.toml").write_text(WRONG, encoding="utf-8")
    with pytest.raises(BlindSetError):
        read_set(CURRICULUM, tmp_path)
