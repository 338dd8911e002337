"""The learner's file under torchrun: what is told about a failure, and what is left."""

import os
import time
from pathlib import Path

import pytest

from distlab.curriculum import UnitSource
from distlab.grading import NotYetError
from distlab.grading.checks.trainer import main_torchrun
from distlab.grading.checks.trainer.main_torchrun import expect_clean_end
from distlab.runner.processes import descendants

SLEEPS = """
import os, pathlib, sys, time
here = pathlib.Path({folder!r})
(here / f"{{os.environ['RANK']}}.part").write_text(str(os.getpid()))
(here / f"{{os.environ['RANK']}}.part").rename(here / f"{{os.environ['RANK']}}.pid")
print("sleeping", flush=True)
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    """Whether a process runs: one that is dead and not buried does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] != "Z"


def source_of(text: str) -> UnitSource:
    return UnitSource("trainer", "file", Path("mine_trainer.py"), text)


def test_what_the_file_raised_is_told_and_its_output_shown() -> None:
    text = "print('so far so good', flush=True)\n{}['weights']\n"
    with pytest.raises(NotYetError) as caught:
        expect_clean_end(source_of(text), 1)
    assert caught.value.message.endswith("1: KeyError: 'weights'")
    assert "mine_trainer.py" in caught.value.output


def test_without_distlab_an_import_of_it_fails() -> None:
    with pytest.raises(NotYetError) as caught:
        expect_clean_end(source_of("from distlab.comm import Comm\n"), 1)
    assert caught.value.slug == "still-needs-distlab"


def test_weights_that_were_not_saved_are_missed() -> None:
    with pytest.raises(NotYetError, match=r"\bweights\.pt\b"):
        expect_clean_end(source_of("x = 1\n"), 1)


def test_nothing_is_left_when_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Wait until both ranks run, not for a time that may be too short for that.
    ranks = [tmp_path / "0.pid", tmp_path / "1.pid"]
    wait = main_torchrun.subprocess.Popen.wait

    def waiting(process: object, timeout: float | None = None) -> int:
        while timeout and not all(path.exists() for path in ranks):
            time.sleep(0.05)
            assert process.poll() is None  # type: ignore[attr-defined]
        return wait(process, 0.1 if timeout else None)  # type: ignore[arg-type]

    monkeypatch.setattr(main_torchrun.subprocess.Popen, "wait", waiting)
    with pytest.raises(
        NotYetError, match=rf"\b{main_torchrun.LIMIT_S:g} s\b"
    ) as caught:
        expect_clean_end(source_of(SLEEPS.format(folder=str(tmp_path))), 2)
    assert "sleeping" in caught.value.output
    pids = {int(path.read_text()) for path in ranks}
    assert len(pids) == 2
    assert not pids & set(descendants(os.getpid()))
    assert not any(is_alive(pid) for pid in pids)
