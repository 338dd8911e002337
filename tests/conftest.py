"""Say at the top which files are graded, when one of the phase tests is run."""

import signal

import pytest

from distlab.search_order import put_last

put_last()  # pytest looks for modules in the working folder first

# A shell that starts a job in the background has it ignore Ctrl-C; some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate-golden",
        action="store_true",
        help="write the wording of outputs anew to tests/golden, to be read in the diff",
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    modules = dict.fromkeys(getattr(item, "module", None) for item in session.items)
    for line in [line for m in modules for line in getattr(m, "HEADER", [])]:
        reporter.write_line(line)
