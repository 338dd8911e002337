"""What the lab of phase 3 computes itself: fits, tables, and its runs of services."""

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from distlab.walkthroughs import phase3_rank
from distlab.walkthroughs.phase3 import fit
from distlab.walkthroughs.phase3_lab import print_choices, print_table
from distlab.walkthroughs.phase3_services import Services
from solutions.phase3_multi_node import (
    distributed_data_parallel,
    parameter_server,
    process_group,
)

UNITS: dict[str, ModuleType] = {
    "parameter_server": parameter_server,
    "process_group": process_group,
}


def run_here(unit: str, ranks: int, scenario: Callable[..., Any], **values: Any) -> Any:
    """Run a scenario of a single rank in this process."""
    assert ranks == 1
    return SimpleNamespace(values=[scenario(None, UNITS[unit], **values)])


@pytest.fixture
def services() -> Services:
    return Services(run_here, lambda num_bytes: 1e-3)


def test_the_fit_finds_alpha_and_beta() -> None:
    sizes = [1_000, 10_000, 100_000]
    alpha_s, s_per_byte = fit(sizes, [2e-6 + 3e-9 * size for size in sizes])
    assert alpha_s == pytest.approx(2e-6)
    assert s_per_byte == pytest.approx(3e-9)


def test_a_table_has_a_line_per_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {
        "8": {"ring": 1234.56, "steps": 14, "end": "failed"},
        "16": {"ring": 7.0, "steps": 1234, "end": ""},
    }
    print_table(rows, "ranks", digits=1)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["ranks", "ring", "steps", "end"],
        ["8", "1,234.6", "14", "failed"],
        ["16", "7.0", "1,234"],
    ]


def test_choices_are_printed_as_letters(capsys: pytest.CaptureFixture[str]) -> None:
    print_choices((8, 16), {"a": [["ring"], ["naive"]], "b": [["ring"], ["ring"]]})
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["ranks", "a", "b"],
        ["8", "r", "r"],
        ["16", "n", "r"],
    ]


# ── services ────────────────────────────────────────────────────────────────────────


def test_a_message_has_its_reply_and_when_it_came(services: Services) -> None:
    messages = ("1: join a", "1: wait x y", "1: join b", "2: add x 3", "2: get y")
    rows = services.meet(2, messages)
    assert [(row["reply"], row["after message"]) for row in rows.values()] == [
        ("0", 3),
        ("refused", 4),
        ("1", 3),
        ("3", 4),
        ("none", "never"),
    ]


def test_a_launcher_gives_up_or_restarts_forever(services: Services) -> None:
    launched = services.launch(30, ignores_sigterm=False, window_s=100)
    assert re.findall(r"\d+", launched.outcome) == ["128", "7"]
    ends = [(line.rank, line.end) for line in launched.lifelines]
    assert ends == 4 * [(2, "failed"), (0, "stopped"), (1, "stopped")]
    restarts = [[*row.values()][-1] for row in launched.generations.values()]
    assert restarts == [0, 1, 2, 3]

    launched = services.launch(30, ignores_sigterm=True, window_s=100)
    assert re.findall(r"\d+", launched.outcome) == ["250"]
    assert {line.end for line in launched.lifelines if not line.rank} == {"killed", ""}


def test_more_servers_help_until_one_has_the_largest_tensor(services: Services) -> None:
    rows = services.step_times(512, (1, 4, 8))
    one, four, eight = (row["yours"] for row in rows.values())
    assert one > 2 * four
    assert four == pytest.approx(eight, rel=0.01)
    assert rows["4"]["in turn"] > four
    assert rows["4"]["ring all-reduce"] == 1.0


def test_an_asynchronous_server_neglects_the_slow_worker(services: Services) -> None:
    by_time, at_end = services.losses((0, None), 5, is_sorted=True, times_s=(0, 20))
    assert at_end["asynchronous"]["loss"] < at_end["bound 0"]["loss"]
    assert by_time["0"]["bound 0"] == by_time["0"]["asynchronous"]
    assert by_time["20"]["bound 0"] < by_time["0"]["bound 0"]
    assert by_time["20"]["asynchronous"] > by_time["0"]["asynchronous"]


def test_a_worker_that_is_gone_holds_up_the_synchronous_server_only(
    services: Services,
) -> None:
    faults = {"none": "", "killed": "kill=0@20s"}
    none, killed = services.pushes_under((0,), faults).values()
    assert none["synchronous"] == none["bound 0"] == 12 * 8
    assert killed["synchronous"] < none["synchronous"] < killed["bound 0"]


@pytest.mark.parametrize(
    ("ignored", "lost"), [("", 0), ("sync", 3), ("sync_folder", 3)]
)
def test_a_crash_loses_what_a_disk_that_ignores_operations_has_not(
    services: Services, ignored: str, lost: int
) -> None:
    rows = services.crashes(ignored)
    assert [row["acknowledged"] for row in rows.values()][-1] == 3
    assert max(row["lost"] for row in rows.values()) == lost  # type: ignore[type-var]
    names = "".join(rows)
    assert ("sync(" in names, "sync_folder(" in names) == (
        ignored != "sync",
        ignored != "sync_folder",
    )


def test_a_script_that_kills_the_server_is_found_and_shrunk(services: Services) -> None:
    kinds = ("restart", "torn", "loss")
    (none,) = services.failing_scripts("", kinds, 10)
    assert none.startswith("0 of 10 ")
    first, *lines = services.failing_scripts("sync", kinds, 10)
    assert not first.startswith("0 of")
    (start,) = (at for at, line in enumerate(lines) if line.startswith("shrunk"))
    (fault,) = lines[start + 1 :]
    assert fault.strip().startswith(("torn=server", "restart=server"))


OWN = """
import torch, torch.distributed as dist
from distlab.comm import TorchComm
from distributed_data_parallel import DistributedDataParallel
dist.init_process_group("nccl")
ddp = DistributedDataParallel(torch.nn.Linear(64, 64), TorchComm.from_default())
ddp(torch.ones(8, 64)).sum().backward()
print("done")
"""


def test_a_script_imports_the_learners_class_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(OWN)
    context: Any = None  # it isn't looked at
    told = phase3_rank.own_script(
        context,
        distributed_data_parallel,
        path=str(path),
        counts=(2, 4),
        flops_per_s=1e9,
    )
    assert told["printed"] == "done\n"
    two, four = told["figures"]
    assert two["calls"] == four["calls"] == 1
    assert 0 < two["exposed_s"] < four["exposed_s"] < four["time_s"]
