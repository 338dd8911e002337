"""The trainer on real processes: engines, switches, a kill, the learner's code."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from distlab.curriculum import find_root
from distlab.data.digits import load_digits_split

ROOT = find_root(Path(__file__))
SCRIPT = ROOT / "solutions" / "phase4_production" / "imagenet_trainer.py"
PROGRAM = ROOT / "tests" / "workbench" / "trainer" / "runs.py"
SMALL = ["--global-batch-size", "24", "--num-samples", "240", "--max-steps", "8"]

pytestmark = pytest.mark.slow


def torchrun(
    num_ranks: int, *arguments: object, cwd: Path = ROOT
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.Popen(
        [*command, f"--nproc-per-node={num_ranks}", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finished(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=1000)
    assert process.returncode == 0, said
    return said


def losses(
    tmp_path: Path, num_ranks: int, cases: dict[str, list[str]]
) -> dict[str, list[float]]:
    """The loss of each step of each case, all played in one start of the ranks."""
    given, folder = tmp_path / f"{num_ranks}.json", tmp_path / str(num_ranks)
    given.write_text(json.dumps(cases))
    finished(torchrun(num_ranks, PROGRAM, folder, given))
    return {name: losses_in(folder / name) for name in cases}


def losses_in(folder: Path) -> list[float]:
    lines = (folder / "figures.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def samples_in(folder: Path) -> Counter[str]:
    """How often all ranks together have trained on each sample."""
    files = folder.glob("samples.*")
    return Counter(line for path in files for line in path.read_text().splitlines())


def test_engines_and_numbers_of_ranks_have_equal_losses(tmp_path: Path) -> None:
    flags = [
        "--model",
        "narrow_vit",
        "--precision",
        "fp64",
        "--lr",
        "0.02",
        "--max-steps",
        "20",
        "--ema",
        "0.9",
        "--global-batch-size",
        "60",
        "--clip-norm",
        "1",
        "--grad-accum-steps",
        "2",
        "--code",
        "reference",
    ]
    engines = ("scratch", "ddp", "fsdp2")
    cases = {engine: [*flags, "--engine", engine] for engine in engines}
    found = {n: losses(tmp_path, n, cases) for n in (1, 2, 3)}
    baseline = found[1]["scratch"]
    assert len(baseline) == 20
    assert baseline[-1] < baseline[0]
    for n, by_engine in found.items():
        for engine, row in by_engine.items():
            pairs = zip(row, baseline, strict=True)
            largest = max(abs(a - b) for a, b in pairs)
            assert largest <= 1e-10, (n, engine, largest)


def test_two_ranks_then_one_then_two_read_each_sample_once(tmp_path: Path) -> None:
    """One epoch of 23 steps in three starts, beside one start on two ranks."""
    flags = ["--model", "narrow_vit", "--precision", "fp64", "--lr", "0.02"]
    flags += ["--global-batch-size", "60", "--code", "reference", "--save-every", "4"]
    unbroken = losses(tmp_path, 2, {"unbroken": flags})["unbroken"]
    flags += ["--checkpoint", str(tmp_path / "saved")]
    resumed: list[float] = []
    samples: Counter[str] = Counter()
    for start, (num_ranks, last_step) in enumerate(((2, 8), (1, 16), (2, 23))):
        case = {f"start {start}": [*flags, "--max-steps", str(last_step)]}
        (row,) = losses(tmp_path, num_ranks, case).values()
        resumed += row
        samples += samples_in(tmp_path / str(num_ranks) / f"start {start}")
    assert len(resumed) == len(unbroken) == 23
    pairs = zip(resumed, unbroken, strict=True)
    assert max(abs(a - b) for a, b in pairs) <= 1e-10
    assert samples == samples_in(tmp_path / "2" / "unbroken")
    assert len(samples) == samples.total() == 23 * 60  # the digits are all different


SWITCHES = {
    "bf16": "--precision bf16",
    "fp16": "--precision fp16",
    "fp64": "--precision fp64",
    "channels_last": "--channels-last",
    "accumulation": "--grad-accum-steps 3",
    "clipping": "--clip-norm 0.5",
    "average": "--ema 0.9",
    "smoothing": "--label-smoothing 0.1",
    "mixup": "--mixup 0.2",
    "cutmix": "--cutmix 1",
    "top_k": "--compression top_k",
    "int8": "--compression int8",
    "powersgd": "--compression powersgd",
    "compressed_bf16": "--compression bf16",
    "lars": "--optimizer lars --weight-decay 1e-4",
    "lamb": "--optimizer lamb --lr 0.01",
    "adamw": "--optimizer adamw --lr 0.001",
    "progressive": "--image-size 16 --smallest-image 8 --epochs 2",
    "ddp": "--engine ddp",
    "fsdp2": "--engine fsdp2",
    "vit": "--model narrow_vit",
    "workers": "--num-workers 1",
    "all": "--precision bf16 --channels-last --grad-accum-steps 2 "
    "--clip-norm 1 --ema 0.9 --label-smoothing 0.1 --mixup 0.2 --cutmix 1 "
    "--compression top_k --optimizer lars --image-size 16 --smallest-image 8 "
    "--epochs 2 --warmup-epochs 0.2 --norm-weight-decay 0 --weight-decay 1e-4",
}
SAME_LOSSES = {"workers", "ddp", "fsdp2", "average"}
"""Other ways to the same numbers; the average is only evaluated."""


@pytest.mark.own
def test_each_switch_alone_and_all_together(tmp_path: Path) -> None:
    """Eight steps each on two processes; a switch that has an effect shows it."""
    cases = {"none": SMALL} | {
        name: [*SMALL, *flags.split()] for name, flags in SWITCHES.items()
    }
    cases["saved"] = [*SMALL, "--checkpoint", str(tmp_path / "saved")]
    cases["profiled"] = [*SMALL, "--profile", str(tmp_path / "profile")]
    found = losses(tmp_path, 2, cases)
    for name, row in found.items():
        assert len(row) == 8, name
        assert all(torch.isfinite(torch.tensor(row))), name
    assert found["saved"] == found["profiled"] == found["none"]
    assert list((tmp_path / "saved").glob("*"))
    assert (tmp_path / "profile" / "rank_1.trace.json").is_file()
    for name in SWITCHES.keys() - SAME_LOSSES:
        assert found[name] != found["none"], name
    for name in SAME_LOSSES:
        pairs = zip(found[name], found["none"], strict=True)
        assert max(abs(a - b) for a, b in pairs) < 1e-5, name
    assert abs(found["channels_last"][0] - found["none"][0]) < 1e-5


@pytest.mark.own
def test_a_compiled_model_has_the_same_losses(tmp_path: Path) -> None:
    """On one process: a compilation takes 40 s of processor time on each."""
    flags = [*SMALL, "--model", "narrow_vit", "--lr", "0.01"]
    found = losses(tmp_path, 1, {"plain": flags, "compiled": [*flags, "--compile"]})
    pairs = zip(found["compiled"], found["plain"], strict=True)
    assert max(abs(a - b) for a, b in pairs) < 1e-3


EVERYTHING = [
    "--global-batch-size",
    "24",
    "--num-samples",
    "240",
    "--epochs",
    "3",
    "--max-steps",
    "24",
    "--mixup",
    "0.2",
    "--cutmix",
    "1",
    "--label-smoothing",
    "0.1",
    "--precision",
    "fp16",
    "--grad-accum-steps",
    "2",
    "--ema",
    "0.9",
    "--clip-norm",
    "1",
    "--compression",
    "top_k",
    "--warmup-epochs",
    "0.5",
    "--log-every",
    "1",
    "--save-every",
    "5",
    "--code",
    "reference",
    "--checkpoint",
]


def weights_in(said: str) -> str:
    (found,) = re.findall(r"step 24  weights ([0-9a-f]{8})", said)
    return str(found)


def children_of(pid: int) -> list[int]:
    """The processes that torchrun has started: each has a session of its own."""
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True
    )
    found = [int(number) for number in listed.stdout.split()]
    assert len(found) >= 2
    return found


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("unbroken")
    return weights_in(finished(torchrun(2, SCRIPT, *EVERYTHING, folder)))


def test_killed_and_resumed_is_bit_equal(tmp_path: Path, unbroken: str) -> None:
    """SIGKILL of all processes in the middle of an epoch, after a save."""
    process = torchrun(2, SCRIPT, *EVERYTHING, tmp_path / "killed")
    assert process.stdout is not None
    before = ""
    for line in process.stdout:
        before += line
        if line.startswith("step 13 "):
            workers = children_of(process.pid)
            for pid in (process.pid, *workers):
                os.kill(pid, signal.SIGKILL)
            break
    else:
        pytest.fail(before)
    process.wait()
    process.stdout.close()
    resumed = finished(torchrun(2, SCRIPT, *EVERYTHING, tmp_path / "killed"))
    first = min(map(int, re.findall(r"^step (\d+)  loss", resumed, re.MULTILINE)))
    assert 6 <= first <= 16, resumed
    assert weights_in(resumed) == unbroken


@pytest.mark.parametrize("who", ["torchrun", "rank 1", "torchrun with data workers"])
def test_after_sigterm_a_step_is_saved_and_the_next_start_goes_on(
    tmp_path: Path, who: str, unbroken: str
) -> None:
    """As SLURM and Kubernetes end a job; and if only one of the ranks hears of it."""
    flags = [*EVERYTHING, tmp_path / "ended"]
    if "workers" in who:
        flags += ["--num-workers", "2"]
    process = torchrun(2, SCRIPT, *flags)
    assert process.stdout is not None
    before = ""
    for line in process.stdout:
        before += line
        if line.startswith("step 11 "):
            to_one = who == "rank 1"
            pid = max(children_of(process.pid)) if to_one else process.pid
            os.kill(pid, signal.SIGTERM)
            break
    else:
        pytest.fail(before)
    after, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "SIGTERM came: this step is saved" in after
    last = max(map(int, re.findall(r"^step (\d+)  loss", before + after, re.MULTILINE)))
    assert 11 <= last < 24
    resumed = finished(torchrun(2, SCRIPT, *flags))
    first = min(map(int, re.findall(r"^step (\d+)  loss", resumed, re.MULTILINE)))
    assert first == last + 1
    assert weights_in(resumed) == unbroken


def test_the_end_is_saved_and_records_go_on(tmp_path: Path) -> None:
    """The same command again, as a queue does it: nothing is recorded twice."""
    flags = [SCRIPT, "--global-batch-size", "24", "--num-samples", "240"]
    flags += ["--save-every", "4", "--log-every", "1", "--code", "reference"]
    flags += ["--checkpoint", tmp_path / "saved", "--records", tmp_path / "records"]
    finished(torchrun(1, *flags, "--max-steps", "6"))
    figures = tmp_path / "records" / "figures.jsonl"
    lines = figures.read_text().splitlines(keepends=True)
    # As if the process had been killed in step 8, after the checkpoint of step 6.
    figures.write_text(
        "".join([*lines, '{"step": 7, "loss": 9.9}\n', '{"step": 8, "l'])
    )
    finished(torchrun(1, *flags))
    steps = [json.loads(line)["step"] for line in figures.read_text().splitlines()]
    assert steps == list(range(1, 11))
    assert 9.9 not in losses_in(tmp_path / "records")
    assert (tmp_path / "saved" / "step-10.json").is_file()
    said = finished(torchrun(1, *flags, "--max-steps", "9"))
    assert "--max-steps 9: the checkpoint has step 10" in said
    assert "step 10  weights" in said


def test_records_of_another_run_are_not_touched(tmp_path: Path) -> None:
    flags = [SCRIPT, *SMALL, "--code", "reference", "--log-every", "1"]
    flags += ["--records", tmp_path / "records"]
    finished(torchrun(1, *flags, "--checkpoint", tmp_path / "one"))
    before = (tmp_path / "records" / "figures.jsonl").read_text()
    process = torchrun(1, *flags, "--checkpoint", tmp_path / "other")
    said, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "holds the records of another run: choose a new folder" in said
    assert (tmp_path / "records" / "figures.jsonl").read_text() == before


def test_a_checkpoint_of_another_model_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    first = [SCRIPT, *SMALL, "--code", "reference", "--checkpoint", folder]
    finished(torchrun(1, *first))
    process = torchrun(1, *first, "--max-steps", "9", "--model", "narrow_vit")
    said, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    lines = [line for line in said.splitlines() if "imagenet_trainer: " in line]
    assert len(lines) == 1, said
    assert "the checkpoint is of another model" in lines[0]


def test_mine_with_the_solutions_copied_in_is_bit_equal(tmp_path: Path) -> None:
    course = tmp_path / "course"
    for name in ("solutions", "curriculum.toml", *_phases()):
        place = ROOT / name
        if place.is_dir():
            shutil.copytree(place, course / name)
        else:
            shutil.copy(place, course / name)
    for solution in (course / "solutions").glob("phase*/*.py"):
        folder = course / solution.parent.name
        shutil.copy(solution, folder / f"template_{solution.name}")
    flags = [
        "--global-batch-size",
        "24",
        "--num-samples",
        "240",
        "--max-steps",
        "24",
        "--epochs",
        "3",
    ]
    script = "solutions/phase4_production/imagenet_trainer.py"
    said = {
        code: finished(torchrun(2, script, *flags, "--code", code, cwd=course))
        for code in ("mine", "reference")
    }
    assert weights_in(said["mine"]) == weights_in(said["reference"])


def _phases() -> list[str]:
    return [path.name for path in ROOT.glob("phase*_*") if path.is_dir()]


def test_a_folder_of_images(tmp_path: Path) -> None:
    """Two processes, each with one that decodes; the images are the digits."""
    image = pytest.importorskip("PIL.Image", reason="pip install pillow")
    digits = load_digits_split()
    for split, first in (("train", 0), ("val", 60)):
        for place in range(first, first + 60):
            folder = tmp_path / split / str(int(digits.train_targets[place]))
            folder.mkdir(parents=True, exist_ok=True)
            pixels = (digits.train_inputs[place].view(8, 8) * 255).byte().numpy()
            image.fromarray(pixels).resize((40, 40)).save(folder / f"{place}.png")
    flags = "--image-size 32 --global-batch-size 16 --num-workers 1 --num-classes"
    command = [SCRIPT, "--code", "reference", "--data", tmp_path, *flags.split()]
    said = finished(torchrun(2, *command, 10))
    assert re.search(r"^epoch 1  accuracy 0\.\d{4}", said, re.MULTILINE)
    assert "step 3  weights" in said
    process = torchrun(1, *command, 11)
    said, _ = process.communicate(timeout=300)
    assert f"--num-classes 11: {tmp_path} has 10 classes" in said
