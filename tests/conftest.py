"""Say at the top which files are graded, when one of the phase tests is run."""

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from distlab.search_order import put_last

put_last()  # pytest looks for modules in the working folder first

# A shell that starts a job in the background has it ignore Ctrl-C; some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Everything temporary goes to one folder, which is removed when the session ends.
# We can't fix what torch leaves there when a test kills its processes, but a folder of
# distlab's own that is still there is a defect, and fails the session.
FOLDER = pytest.StashKey[str]()
OURS = ("distlab-", "chaos-", "dl-", "ray-")


@pytest.hookimpl(tryfirst=True)  # pytest itself reads `basetemp` in this hook
def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # xdist's workers inherit it
        return
    folder = tempfile.mkdtemp(prefix="dt-")
    os.chmod(folder, 0o1777)  # as /tmp is: some tests act as an ordinary user
    config.stash[FOLDER] = folder
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # Shorter than pytest's own: the path of a Unix socket has 107 characters at most,
    # and a data worker or a Docker engine that can't bind one hangs.
    config.option.basetemp = config.option.basetemp or f"{folder}/t"


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    folder = session.config.stash.get(FOLDER, None)
    if folder is None:
        return
    left = sorted(path.name for path in Path(folder).iterdir())
    left = [name for name in left if name.startswith(OURS)]
    if left:
        print(f"\nleft behind in the temporary folder: {', '.join(left)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config: pytest.Config) -> None:
    folder = config.stash.get(FOLDER, None)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate-golden",
        action="store_true",
        help="write the wording of outputs to tests/golden, to be read in the diff",
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    modules = dict.fromkeys(getattr(item, "module", None) for item in session.items)
    for line in [line for m in modules for line in getattr(m, "HEADER", [])]:
        reporter.write_line(line)
