"""Scripts on simulated ranks: what each rank has to itself, and the same numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from distlab.sim import SimRun
from distlab.sim.torch.script import Script, run_script
from tests.workbench.launching import free_port

OWN = """
import json, logging, os, random, sys
import numpy, torch, torch.distributed as dist
import state

assert not dist.is_initialized()
dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
sys.argv.append(f"--seen-by={rank}")
os.environ["MINE"] = str(rank)
state.seen.append(rank)
torch_first = torch.rand(1).item()
random.seed(rank), numpy.random.seed(rank), torch.manual_seed(rank)
os.makedirs(f"folder-{rank}")
os.chdir(f"folder-{rank}")
logging.basicConfig(format=f"{rank}: %(message)s", level=logging.INFO + rank)
logging.getLogger("theirs").setLevel(50 + rank)
drawn = []
for _ in range(3):
    drawn += [random.random(), numpy.random.rand(), torch.rand(1).item()]
    dist.barrier()
logging.error("told")
import late  # after the others have had their turns
class Pickled: pass
import pickle
pickle.dumps(Pickled())
dist.barrier()
print("report", json.dumps({
    "argv": sys.argv[1:], "mine": os.environ["MINE"], "seen": state.seen,
    "late": late.rank, "folder": os.path.basename(os.getcwd()), "drawn": drawn,
    "torch_first": torch_first, "level": logging.getLogger("theirs").level,
    "root_level": logging.root.level, "name": __name__,
    **{k: int(os.environ[k]) for k in (
        "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")},
}))
"""
TRAINING = """
import os, random
import numpy, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
losses = []

def sharded(model):
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model

for wrap in (DistributedDataParallel, sharded):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.3), nn.Linear(12, 1)).double()
    torch.manual_seed(100 + rank), random.seed(rank), numpy.random.seed(rank)
    model = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(5):
        inputs = torch.randn(4, 6).double() + random.random() + numpy.random.rand()
        loss = model(inputs).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
dist.destroy_process_group()
with open(f"{os.environ['OUT']}-{rank}", "w") as file:
    print(*losses, file=file)
"""

# One time in twenty torch 2.13's gloo aborts a process that has done everything, when
# its last objects are freed.
AND_LEAVE = """
import os, runpy
runpy.run_path("program.py", run_name="__main__")
os._exit(0)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "state.py").write_text("seen = []\n")
    (tmp_path / "late.py").write_text("import os\nrank = int(os.environ['RANK'])\n")
    return tmp_path


def play(folder: Path, text: str, n: int, *args: str, **options: object) -> SimRun:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    return run_script(Script(str(path), args), n, **options)  # type: ignore[arg-type]


def reports(done: SimRun) -> list[Any]:
    """What the script reported on each rank."""
    done.require_finished()
    lines = [record.output.partition("report ")[2] for record in done.ranks]
    return [json.loads(line) for line in lines]


def test_each_rank_has_a_process_of_its_own(folder: Path) -> None:
    main, here = sys.modules["__main__"], os.getcwd()
    argv, path = list(sys.argv), list(sys.path)
    told = reports(play(folder, OWN, 4, "--lr", "0.1", per_node=2))
    for rank, mine in enumerate(told):
        assert mine["argv"] == ["--lr", "0.1", f"--seen-by={rank}"]
        assert mine["seen"] == [rank]
        assert mine["mine"] == str(rank)
        assert mine["late"] == rank
        assert mine["folder"] == f"folder-{rank}"
        assert mine["level"] == 50 + rank
        assert mine["root_level"] == 20 + rank
        assert mine["name"] == "__main__"
        nodes = [mine[key] for key in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
        assert [*nodes, mine["GROUP_RANK"]] == [4, rank % 2, 2, rank // 2]
        assert mine["drawn"] == drawn_alone(rank)
    assert len({str(mine["torch_first"]) for mine in told}) == 4
    assert [os.getcwd(), sys.argv, sys.path] == [here, argv, path]
    assert "state" not in sys.modules
    assert sys.modules["__main__"] is main


def drawn_alone(seed: int) -> list[float]:
    import random

    import numpy
    import torch

    mine, theirs = random.Random(seed), numpy.random.RandomState(seed)
    torchs = torch.Generator().manual_seed(seed)
    return [
        number
        for _ in range(3)
        for number in (
            mine.random(),
            theirs.rand(),
            torch.rand(1, generator=torchs).item(),
        )
    ]


def test_a_module_runs_as_with_python_m(folder: Path) -> None:
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("number = 7\n")
    (package / "__main__.py").write_text(
        "import json, sys\nfrom .part import number\n"
        "print('report', json.dumps([number, sys.argv[1:], __name__]))\n"
    )
    done = run_script(Script("package", ("-x",), is_module=True), 2)
    assert reports(done) == [[7, ["-x"], "__main__"]] * 2


def test_how_a_script_ends_is_known(folder: Path) -> None:
    text = """
        import os, sys
        if sys.argv[1] == "exit": sys.exit(int(os.environ["RANK"]) and 3)
        if sys.argv[1] == "leave": sys.exit()
        raise ValueError("no")
    """
    ends = {arg: play(folder, text, 2, arg) for arg in ("exit", "leave", "raise")}
    assert ends["leave"].outcome == "finished"
    statuses = [record.status for record in ends["exit"].ranks]
    assert statuses == ["finished", "raised"]
    error = ends["raise"].ranks[1].error
    assert error is not None
    assert error.type == "ValueError"
    assert error.frames[-1] == (str(folder / "program.py"), 5)
    assert ends["raise"].ranks[0].output.startswith("Traceback")
    for script in (Script("missing.py"), Script("missing", is_module=True)):
        with pytest.raises(ValueError, match="missing"):
            run_script(script, 2)
    with pytest.raises(ValueError, match="program"):
        play(folder, "def", 2)


def test_what_is_around_a_script_sees_it_from_within(folder: Path) -> None:
    @contextmanager
    def around(rank: int) -> Iterator[list[object]]:
        seen: list[object] = [rank, os.environ["RANK"]]
        yield seen
        seen.append(sys.modules["__main__"].__dict__["answer"])

    heard: list[tuple[int, str]] = []
    done = play(
        folder,
        "import os\nanswer = 10 * int(os.environ['RANK'])\nprint(answer)",
        3,
        around=around,
        on_output=lambda rank, text: heard.append((rank, text)),
    )
    assert done.values == [[0, "0", 0], [1, "1", 10], [2, "2", 20]]
    assert [pair for pair in heard if pair[1].strip()] == [
        (0, "0"), (1, "10"), (2, "20")
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 4])
def test_losses_are_those_of_real_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    monkeypatch.setenv("OUT", str(folder / "simulated"))
    play(folder, TRAINING, n).require_finished()
    port = str(free_port())
    real = [
        subprocess.Popen(
            [sys.executable, "-c", AND_LEAVE],
            env={
                **os.environ,
                "OUT": str(folder / "real"),
                "RANK": str(r),
                "WORLD_SIZE": str(n),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
        )
        for r in range(n)
    ]
    assert [process.wait() for process in real] == [0] * n
    for rank in range(n):
        texts = [
            (folder / f"{kind}-{rank}").read_text() for kind in ("simulated", "real")
        ]
        simulated, expected = ([float(x) for x in text.split()] for text in texts)
        assert simulated == pytest.approx(expected, abs=1e-10, rel=0)
        assert len(simulated) == 2 * 5  # with DDP, and with FSDP2
