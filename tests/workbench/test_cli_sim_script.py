"""`distlab sim -n 4 script.py`: what it reports, and how a hang is worded."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distlab.cli.app import app
from distlab.cli.sim_script import placed
from distlab.simulated import script_facts
from tests.workbench.golden import Golden

HEAD = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
"""
LAYERS = """
weights = torch.ones(250)
for _ in range(3):
    work = dist.all_reduce(weights, async_op=True)
    product = torch.ones(100, 100) @ torch.ones(100, 100)
    work.wait()
dist.barrier()
print("arguments", sys.argv[1:], "local rank", os.environ["LOCAL_RANK"])
"""
HANGS = {
    "operation": """
for _ in range(2):
    dist.all_reduce(torch.ones(3))
if rank == 0:
    dist.barrier()
else:
    dist.all_reduce(torch.ones(3))
""",
    "absent": """
if rank:
    dist.all_reduce(torch.ones(3))
""",
    "circle": """
groups = [dist.new_group([0, 1, 2, 3]) for _ in range(2)]
for group in groups if rank % 2 else reversed(groups):
    dist.all_reduce(torch.ones(3), group=group)
""",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sim(text: str, *args: str, options: tuple[str, ...] = ()) -> Any:
    Path("program.py").write_text(HEAD + textwrap.dedent(text))
    words = ["sim", "-n", "4", *options, "program.py", *args]
    return CliRunner().invoke(app, words)


def figures(text: str, *args: str, options: tuple[str, ...] = ()) -> Any:
    done = sim(text, *args, options=("--json", *options))
    return json.loads(done.stdout), done


def test_the_figures_of_a_script(folder: Path) -> None:
    options = ("--net", "alpha=1ms,bw=8Gbit", "--flops", "1e9", "--nodes", "2x2")
    row, done = figures(LAYERS, "--lr", "-n", options=options)
    assert done.exit_code == 0
    assert (row["outcome"], row["world_size"]) == ("finished", 4)
    assert (row["nodes"], row["ranks_per_node"]) == (2, 2)
    assert "['--lr', '-n'] local rank 0" in done.stderr
    assert done.stderr.count("arguments") == 1
    kinds = {kind["op"]: kind for kind in row["collectives"]}
    reduced = kinds["all_reduce"]
    assert (reduced["calls"], reduced["bytes"], reduced["ranks"]) == (3, 3000, 4)
    computed_s = 3 * 2e6 / 1e9
    assert row["time_s"] == pytest.approx(row["exposed_s"] + computed_s)
    # What is computed meanwhile hides a part of each reduction.
    assert reduced["under_way_s"] == pytest.approx(reduced["exposed_s"] + computed_s)
    assert sum(row["critical_path"].values()) == pytest.approx(row["time_s"])
    assert row["critical_lines"][0]["at"].startswith("program.py:")
    assert figures(LAYERS, options=options)[0]["trace_hash"] == row["trace_hash"]


def test_a_straggler_makes_others_wait(folder: Path) -> None:
    options = ("--fault", "straggler=2:3", "--flops", "1e9", "--net", "nvlink")
    row, _ = figures(
        "torch.ones(100, 100) @ torch.ones(100, 100)\ndist.barrier()", options=options
    )
    (barrier,) = (kind for kind in row["collectives"] if kind["op"] == "barrier")
    assert barrier["late_s"] == pytest.approx(3 / 4 * 2 * 2e6 / 1e9)
    assert row["exposed_most_rank"] != 2


def test_all_output_names_the_rank(folder: Path, golden: Golden) -> None:
    done = sim(LAYERS, options=("--all-output", "--html", "page.html"))
    for rank in range(4):
        assert f"[rank {rank}] arguments [] local rank {rank}\n" in done.stdout
    assert "all_reduce" in Path("page.html").read_text()
    golden("cli/sim-script", done.stdout)


@pytest.mark.parametrize("kind", HANGS)
def test_a_hang_names_calls_and_lines(folder: Path, kind: str, golden: Golden) -> None:
    row, done = figures(HANGS[kind])
    assert done.exit_code == 1
    assert row["outcome"] == "deadlock"
    golden(f"cli/sim-script-{kind}", row["explanation"])


def test_a_module(folder: Path) -> None:
    package = folder / "package"
    package.mkdir()
    (package / "train.py").write_text(f"{HEAD}print(__package__, sys.argv[1:])")
    words = ["sim", "-n", "2", "-m", "package.train", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0
    assert "package ['--json']" in done.stdout


def test_a_package_that_keeps_state_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = folder / "site-packages"
    installed.mkdir()
    (installed / "keeper.py").write_text(
        "users = []\n"
        "def enter():\n"
        "    assert not users, 'somebody is here'\n"
        "    users.append(1)\n"
    )
    monkeypatch.syspath_prepend(installed)
    row, done = figures("import keeper\nkeeper.enter()")
    assert done.exit_code == 1
    (note,) = row["notes"]
    assert "--own keeper" in note
    row, done = figures("import keeper\nkeeper.enter()", options=("--own", "keeper"))
    assert done.exit_code == 0
    assert row["notes"] == []


def test_where_ranks_are_placed() -> None:
    assert placed(64, "", 0) == (64, 64)
    assert placed(64, "", 8) == (64, 8)
    assert placed(4, "", 8) == (4, 4)
    assert placed(64, "32x8", 8) == (256, 8)
    assert placed(64, "4", 0) == (64, 16)
    for nodes in ("0x8", "x", "3", "2x-1", "two"):
        with pytest.raises(ValueError, match=nodes):
            placed(64, nodes, 8)


def test_what_is_refused(folder: Path) -> None:
    for words in (
        ["missing.py"],
        ["-m"],
        ["--nodes", "3", "program.py"],
        ["--fault", "kill=9@1s", "program.py"],
    ):
        Path("program.py").write_text("")
        done = CliRunner().invoke(app, ["sim", "-n", "4", *words])
        assert done.exit_code == 2, words


@pytest.mark.parametrize(
    ("option", "target"),
    [
        *((option, "program.py") for option in ("--size=1KiB", "--code=mine")),
        *((option, "program.py") for option in ("--beside", "1.4")),
        *((option, "1.4") for option in ("--nodes=2x2", "--play=0", "--chakra=c")),
        *((option, "1.4") for option in ("--fake", "--flops=1e9", "--own=hydra")),
        *((option, "1.4") for option in ("--device=cpu", "--all-output")),
    ],
)
def test_an_option_without_effect_is_refused(
    folder: Path, option: str, target: str
) -> None:
    Path("program.py").write_text("raise SystemExit('it ran')")
    done = CliRunner().invoke(app, ["sim", "-n", "2", option, target])
    assert done.exit_code == 2
    assert option.partition("=")[0] in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout


def test_a_timeline_that_would_be_too_long_has_a_note(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("--html", "page.html")
    assert figures(LAYERS, options=asked)[0]["timeline"] == "page.html"
    Path("page.html").unlink()
    monkeypatch.setattr(script_facts, "MAX_EVENTS", 10)
    row, done = figures(LAYERS, options=asked)
    assert done.exit_code == 0
    assert "timeline" not in row
    assert not Path("page.html").exists()
    assert len(row["notes"]) == 1


TRAINS = """
from torch import nn
model = nn.parallel.DistributedDataParallel(nn.Linear(32768, 32768, bias=False))
loss = model(torch.randn(2, 32768)).sum()
loss.backward()
print("loss", loss.item())
"""
VALUES = (
    TRAINS
    + """
if loss.item() > 3:
    dist.barrier()
"""
)


def test_a_script_with_a_model_larger_than_this_machine(folder: Path) -> None:
    options = ("--fake", "--play", "0,3", "--flops", "1e14")
    row, done = figures(TRAINS, options=options)
    assert row["outcome"] == "finished"
    size = 4 * 32768**2
    assert row["memory"]["kinds"]["parameters"] == size
    assert row["memory"]["kinds"]["gradients"] == size
    assert sum(row["memory"]["kinds"].values()) == row["memory"]["bytes"] > 2 * size
    assert (row["played"], row["unlike"]) == ([0, 3], [])
    kinds = {kind["op"]: kind for kind in row["collectives"]}
    assert kinds["all_reduce"]["ranks"] == 4
    assert done.stderr == "loss ?\n"


def test_the_report_of_fake_tensors(folder: Path, golden: Golden) -> None:
    done = sim(TRAINS, options=("--fake", "--play", "0,3"))
    assert done.exit_code == 0
    golden("cli/sim-script-fake", done.stdout)
    row, done = figures(VALUES, options=("--fake",))
    assert done.exit_code == 1
    assert (row["outcome"], row["played"]) == ("raised", [0, 1, 2, 3])
    assert "> in `if loss.item() > 3:`" in row["explanation"]
    assert " program.py:13: " in row["explanation"]


@pytest.mark.parametrize("play", ["0,x", "4", "-1", "0;1"])
def test_ranks_that_cannot_be_played(folder: Path, play: str) -> None:
    assert sim(TRAINS, options=("--fake", "--play", play)).exit_code == 2
