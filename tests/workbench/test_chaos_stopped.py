"""`distlab chaos` that is stopped with Ctrl-C or SIGTERM: no process is left of it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.workbench.course import Course
from tests.workbench.launching import linux

STOPPED = "\nstopped; nothing is left running\n"

# A process that no end of a launcher or a rank reaches, as those of a cut link.
LEAVES = """
import os, subprocess, sys, time
from pathlib import Path
if os.environ["RANK"] == "0":
    subprocess.Popen(["sleep", "3600"], start_new_session=True)
    Path(sys.argv[1], "started").touch()
time.sleep(600)
"""

PLAYS = """
import sys
from pathlib import Path
from distlab.chaos.plan import Setting
from distlab.chaos.play import play_cell
try:
    play_cell(None, Setting(num_ranks=2), Path(sys.argv[1]), Path(sys.argv[2]))
except KeyboardInterrupt:
    sys.exit(130)
"""

# A run whose process leaves another one, which is not marked as the run's.
CAMPAIGN = """
import subprocess, sys, time
from pathlib import Path
from distlab.chaos import campaign
from distlab.__main__ import main

def play_cell(*_):
    subprocess.run(["sh", "-c", "sleep 3600 >/dev/null 2>&1 &"])
    Path("started").touch()
    time.sleep(600)

campaign.play_cell = play_cell
sys.argv = ["distlab", "chaos", "--only", "kill-worker@forward/restart", "-n", "2"]
main()
"""


@linux
@pytest.mark.slow
def test_ctrl_c_in_a_run_leaves_no_process(here: Course, tmp_path: Path) -> None:
    script, folder = tmp_path / "leaves.py", tmp_path / "run"
    script.write_text(LEAVES)
    folder.mkdir()
    command = ("-c", PLAYS, str(folder), str(script))
    done = here.stopped(*command, once=(folder / "started").exists)
    assert (done.code, done.err) == (130, "")


@linux
@pytest.mark.slow
def test_ctrl_c_in_a_campaign_leaves_no_process(here: Course) -> None:
    done = here.stopped("-c", CAMPAIGN, once=(here.root / "started").exists)
    assert (done.code, done.err) == (130, STOPPED)


@linux
@pytest.mark.slow
def test_sigterm_in_a_campaign_leaves_no_process(here: Course) -> None:
    started, by = (here.root / "started").exists, signal.SIGTERM
    done = here.stopped("-c", CAMPAIGN, once=started, by=by)
    assert (done.code, done.err) == (143, "")
