"""A plugin for pytest: `@pytest.mark.ranks(4)` runs a test's body on four ranks.

    @pytest.mark.ranks(4)
    def test_sum(rank: int, world_size: int) -> None:
        tensor = torch.tensor([rank])
        dist.all_reduce(tensor)
        assert tensor.item() == 6

If the ranks hang or disagree, the test fails within about a second, and its text is the
report of `distlab run`. docs/pytest.md is the guide.

How this works. Pytest sets up the fixtures in its own process, as always. Then it calls
`pytest_pyfunc_call`, and instead of the body being called here, it's called on ranks:

    job         the body by its name, and the arguments as a pickle
    processes   has the ranks forked, and watches them until the test is decided
    body        what each of these processes runs
    simulated   the same on simulated ranks, in pytest's process
    told        how the test ended: an exception of pytest's, or nothing

Every pytest session of an environment with distlab loads this file, so it imports
nothing besides pytest. The rest is imported when the first marked test runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from distlab.pytest_plugin.processes import Processes

MARK = "ranks"
TIMEOUT = "ranks_timeout"
_HELP = (
    "ranks(n, *, simulated=False, timeout=None): run the test's body on n processes "
    "that are ranks of torch.distributed, or on simulated ones; a hang is a failure "
    "that names ranks and lines, and timeout (seconds) is the last resort."
)
_processes = pytest.StashKey["Processes"]()


class ThisRank:
    """Stands for the rank's number until the body is called there."""

    def __repr__(self) -> str:
        return "the rank's number, on each rank"


THIS_RANK = ThisRank()


@pytest.hookimpl
def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting `ranks_timeout`."""
    parser.addini(TIMEOUT, "seconds that a test marked ranks may take", default="300")


@pytest.hookimpl
def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, for --strict-markers."""
    config.addinivalue_line("markers", _HELP)


@pytest.hookimpl
def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process that forks the ranks, if a test has needed one."""
    processes = config.stash.get(_processes, None)
    if processes is not None:
        processes.close()


@pytest.hookimpl
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a marked test whose body we can't call."""
    if item.get_closest_marker(MARK) is not None:
        from distlab.pytest_plugin.job import refuse_kind

        refuse_kind(item)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object | None:
    """Call the body of a marked test on its ranks."""
    marker = pyfuncitem.get_closest_marker(MARK)
    if marker is None:
        return None
    from distlab.pytest_plugin.job import job_of, wanted

    setting = wanted(marker, pyfuncitem.config.getini(TIMEOUT))
    job = job_of(pyfuncitem)
    if setting.simulated:
        from distlab.pytest_plugin.simulated import run

        result = run(job, setting)
    else:
        result = _started(pyfuncitem.config).run(job, setting)
    from distlab.pytest_plugin.told import conclude

    conclude(pyfuncitem, result)
    return True


def _started(config: pytest.Config) -> Processes:
    if _processes not in config.stash:
        from distlab.pytest_plugin.processes import Processes

        config.stash[_processes] = Processes()
    return config.stash[_processes]


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Any:
    """The number of the rank that runs the body of a test marked `ranks`."""
    _require_mark(request)
    names = getattr(request.node, "_fixtureinfo").argnames  # noqa: B009 - private
    if "rank" not in names:
        pytest.fail(
            "a fixture asks for `rank`, but fixtures run once, in pytest's own "
            "process: ask for it in the test",
            pytrace=False,
        )
    return THIS_RANK


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """The number of ranks that run the body of a test marked `ranks`."""
    from distlab.pytest_plugin.job import wanted

    marker = _require_mark(request)
    return wanted(marker, request.config.getini(TIMEOUT)).world_size


def _require_mark(request: pytest.FixtureRequest) -> pytest.Mark:
    marker: pytest.Mark | None = request.node.get_closest_marker(MARK)
    if marker is None:
        pytest.fail(
            f"{request.fixturename} is for tests on ranks: add @pytest.mark.ranks(2)",
            pytrace=False,
        )
    return marker
