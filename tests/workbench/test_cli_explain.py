"""`distlab explain` with an error of torch: known texts, several, and unknown ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distlab.cli.explain import explain
from distlab.curriculum import load_curriculum
from distlab.curriculum.misconceptions import read_misconceptions
from distlab.curriculum.torch_errors import (
    TorchError,
    find_torch_errors,
    read_torch_errors,
)
from tests.workbench.course import ROOT
from tests.workbench.golden import Golden
from tests.workbench.refusals import refusal

Capture = pytest.CaptureFixture[str]
ERRORS = read_torch_errors()


@pytest.mark.parametrize("error", ERRORS, ids=[error.name for error in ERRORS])
def test_an_entry_is_complete_and_finds_its_own_example(
    error: TorchError, capsys: Capture
) -> None:
    assert find_torch_errors(error.example)[0] is error
    wrapped = "\n[rank0]:   ".join(error.example.split())
    assert error in find_torch_errors(wrapped.replace("[rank0]:", "")), "wrapped"
    assert explain(error.example) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{error.name}: {error.title}\n")
    assert all(text.strip() for text in (error.means, error.why, error.look))
    numbers = {task.number for task in load_curriculum(ROOT).tasks}
    assert error.see
    assert set(error.see) <= numbers | set(read_misconceptions())


def test_there_are_many_and_most_were_provoked() -> None:
    assert len(ERRORS) >= 15
    assert sum(error.provoked for error in ERRORS) >= 15


def test_of_several_the_cause_comes_first(capsys: Capture) -> None:
    log = """
    [rank1]: RuntimeError: Connection reset by peer
    terminate called: op.preamble.length <= op.nbytes. 8 vs 4
    ChildFailedError: Root Cause (first observed failure)
    """
    explain(log)
    said = capsys.readouterr().out
    assert said.startswith("message-larger-than-its-tensor")
    _, *also = find_torch_errors(log)
    assert len(also) == 2
    assert all(error.name in said or error.title in said for error in also)


def test_an_unknown_text_is_one_honest_sentence(golden: Golden) -> None:
    texts = (
        "my dog ate the gradients",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied",
        "nosuchslug",
    )
    told = [refusal(ValueError, explain, text) for text in texts]
    assert ["'nosuchslug'" in one for one in told] == [False, False, True]
    golden("cli/explain-unknown", "\n".join(told))


def test_a_log_can_be_piped(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\xff\x00 " + ERRORS[0].example.encode())

    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    environment["DISTLAB_STATE"] = str(tmp_path)

    def run(text: bytes) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "distlab", "explain"]
        return subprocess.run(
            command,
            input=text,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            timeout=60,
            check=False,
        )

    done = run(log.read_bytes())
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(ERRORS[0].name.encode())
    done = run(b"nothing of ours")
    assert (done.returncode, done.stdout) == (2, b"")
    assert re.fullmatch(rb"distlab: [^\n]+\n", done.stderr)
    assert b"explain --all" in run(b"").stdout
