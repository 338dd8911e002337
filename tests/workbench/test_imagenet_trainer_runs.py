"""The trainer on real processes: engines, switches, signals, the learner's code.

Nearly all of them are ranks of a warm cluster, which only fork. One training is under
torchrun, and those of a single process are in this one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from distlab.cli.app import app
from distlab.curriculum import find_root, load_curriculum
from distlab.data.digits import load_digits_split
from distlab.distributed.notice import SAVED
from distlab.distributed.parts import forget, unit
from distlab.monitor.jsonl import read_folder
from distlab.runner import Cluster, Limits
from tests.workbench.course import Course
from tests.workbench.golden import Golden
from tests.workbench.launching import torchrun
from tests.workbench.trainer.runs import Notes, play, play_code_of, play_signal

ROOT = find_root(Path(__file__))
SCRIPT = ROOT / "solutions" / "phase4_production" / "imagenet_trainer.py"
LIMITS = Limits(seconds=500, memory_bytes=8 << 30)
SMALL = ["--global-batch-size", "24", "--num-samples", "96", "--code", "reference"]


def played(cluster: Cluster, n: int, cases: dict[str, list[str]]) -> dict[str, Notes]:
    """What rank 0 noted in each case."""
    found: dict[str, Notes] = (
        cluster.run(play, n, cases, limits=LIMITS).require_finished().values[0]
    )
    return found


def difference(one: Notes, other: Notes) -> float:
    pairs = zip(one["losses"], other["losses"], strict=True)
    return max(abs(float(a - b)) for a, b in pairs)


@pytest.mark.slow
def test_engines_and_numbers_of_ranks_have_equal_losses(cluster: Cluster) -> None:
    flags = "--model narrow_vit --precision fp64 --lr 0.02 --max-steps 6 --ema 0.9 "
    flags += "--global-batch-size 30 --num-samples 180 --clip-norm 1 "
    flags += "--grad-accum-steps 2 --code reference --engine"
    engines = ("scratch", "ddp", "fsdp2")
    cases = {engine: [*flags.split(), engine] for engine in engines}
    baseline = played(cluster, 1, {"scratch": cases["scratch"]})["scratch"]
    assert len(baseline["losses"]) == 6
    # The last layer begins with zeros: only a training leaves a loss of log(10).
    assert abs(baseline["losses"][-1] - baseline["losses"][0]) > 1e-3
    for name, notes in played(cluster, 3, cases).items():
        assert difference(notes, baseline) <= 1e-10, name


@pytest.mark.slow
def test_two_ranks_then_one_then_two_read_each_sample_once(
    cluster: Cluster, tmp_path: Path
) -> None:
    """One epoch of 8 steps in three starts, beside one start on two ranks."""
    flags = "--model narrow_vit --precision fp64 --lr 0.02 "
    flags += "--global-batch-size 60 --num-samples 480 --code reference"
    unbroken = flags.split()
    saves = [*unbroken, "--checkpoint", str(tmp_path / "saved")]
    saves += ["--save-every", "2", "--max-steps"]
    losses, samples = [], Counter[str]()
    for n, last in ((2, 3), (1, 5), (2, 8)):
        cases = {"resumed": [*saves, str(last)]}
        if last == 8:
            cases["unbroken"] = unbroken
        ranks = cluster.run(play, n, cases, limits=LIMITS).require_finished().values
        losses += ranks[0]["resumed"]["losses"]
        samples.update(line for rank in ranks for line in rank["resumed"]["samples"])
    assert len(losses) == 8
    assert difference({"losses": losses}, ranks[0]["unbroken"]) <= 1e-10
    at_once = Counter(line for rank in ranks for line in rank["unbroken"]["samples"])
    assert samples == at_once
    assert len(samples) == samples.total() == 480  # the digits are all different


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


@pytest.mark.slow
@pytest.mark.own
def test_each_switch_alone_and_all_together(cluster: Cluster, tmp_path: Path) -> None:
    """Four steps each on two processes; a switch that has an effect shows it."""
    cases = {"none": SMALL} | {
        name: [*SMALL, "--max-steps", "4", *flags.split()]
        for name, flags in SWITCHES.items()
    }
    cases["saved"] = [*SMALL, "--checkpoint", str(tmp_path / "saved")]
    cases["profiled"] = [*SMALL, "--profile", str(tmp_path / "profile")]
    found = played(cluster, 2, cases)
    for name, notes in found.items():
        assert len(notes["losses"]) == 4, name
        assert all(torch.isfinite(torch.tensor(notes["losses"]))), name
    plain = found["none"]
    assert found["saved"]["losses"] == found["profiled"]["losses"] == plain["losses"]
    assert list((tmp_path / "saved").glob("*"))
    assert (tmp_path / "profile" / "rank_1.trace.json").is_file()
    for name in SWITCHES.keys() - SAME_LOSSES:
        assert found[name]["losses"] != plain["losses"], name
    for name in SAME_LOSSES:
        assert difference(found[name], plain) < 1e-5, name
    first = found["channels_last"]["losses"][0]
    assert abs(first - plain["losses"][0]) < 1e-5


@pytest.mark.slow
@pytest.mark.own
def test_a_compiled_model_has_the_same_losses(cluster: Cluster) -> None:
    """On one process: a compilation takes 40 s of processor time on each."""
    flags = [*SMALL, "--model", "narrow_vit", "--lr", "0.01"]
    cases = {"plain": flags, "compiled": [*flags, "--compile"]}
    found = played(cluster, 1, cases)
    assert difference(found["compiled"], found["plain"]) < 1e-3


# ── a training that is ended, and goes on ───────────────────────────────────────────

EVERYTHING = (
    "--epochs 3 --mixup 0.2 --cutmix 1 --label-smoothing 0.1 --precision fp16 "
    "--grad-accum-steps 2 --ema 0.9 --clip-norm 1 --compression top_k "
    "--warmup-epochs 0.5 --log-every 1 --save-every 3"
)
STEPS = 12  # four an epoch


def everything(folder: Path) -> list[str]:
    return [*SMALL, *EVERYTHING.split(), "--checkpoint", str(folder)]


@pytest.fixture(scope="module")
def unbroken(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Notes:
    """A training that nothing interrupts."""
    folder = tmp_path_factory.mktemp("unbroken")
    notes = played(cluster, 2, {"unbroken": everything(folder)})["unbroken"]
    assert len(notes["losses"]) == STEPS
    return notes


def goes_on(cluster: Cluster, folder: Path, unbroken: Notes, last: int) -> None:
    """From the step after `last`, with the bits of a training without an end."""
    notes = played(cluster, 2, {"resumed": everything(folder)})["resumed"]
    assert notes["losses"] == unbroken["losses"][last:]
    assert notes["weights"] == unbroken["weights"]


@pytest.mark.slow
def test_killed_and_resumed_is_bit_equal(
    cluster: Cluster, tmp_path: Path, unbroken: Notes
) -> None:
    """SIGKILL in the middle of an epoch, with a step that is not saved."""
    order = everything(tmp_path), 1, 8, int(signal.SIGKILL)
    run = cluster.run(play_signal, 2, *order, limits=LIMITS)
    assert run.outcome != "finished"
    goes_on(cluster, tmp_path, unbroken, last=6)


@pytest.mark.slow
def test_sigterm_to_one_rank_has_all_save_the_step_it_came_in(
    cluster: Cluster, tmp_path: Path, unbroken: Notes
) -> None:
    order = everything(tmp_path), 1, 7, int(signal.SIGTERM)
    run = cluster.run(play_signal, 2, *order, limits=LIMITS)
    for notes in run.require_finished().values:
        assert (notes["exit"], len(notes["losses"])) == (SAVED, 7)
    goes_on(cluster, tmp_path, unbroken, last=7)


SHARDED = (
    "--engine fsdp2 --optimizer adamw --lr 0.01 --weight-decay 0.01 --ema 0.9 "
    "--norm-weight-decay 0 --model narrow_vit --precision fp64 --epochs 2 "
    "--log-every 3"
)


@pytest.mark.slow
def test_shards_that_are_killed_and_resumed_are_bit_equal(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Checkpoints are whole: another engine on other ranks continues from them too."""
    flags = [*SMALL, *SHARDED.split()]
    every = [*flags, "--save-every", "3", "--checkpoint"]
    saved = [*every, str(tmp_path / "saved")]
    order = saved, 1, 6, int(signal.SIGKILL)
    assert cluster.run(play_signal, 2, *order, limits=LIMITS).outcome != "finished"
    shutil.copytree(tmp_path / "saved", tmp_path / "other")
    saved += ["--monitor", str(tmp_path / "one")]
    notes = played(cluster, 2, {"unbroken": flags, "resumed": saved})
    losses = notes["unbroken"]["losses"]
    assert len(losses) == 8
    assert notes["resumed"]["losses"] == losses[3:]
    assert notes["resumed"]["weights"] == notes["unbroken"]["weights"]
    recorded = read_folder(tmp_path / "one")
    for rank in (0, 1):
        assert [row.step for row in recorded.records[rank]] == [4, 6, 8]
    norms = [[row.grad_norm for row in rows] for rows in recorded.records.values()]
    assert norms[0] == norms[1]
    other = [*every, str(tmp_path / "other"), "--engine", "scratch"]
    alone = played(cluster, 1, {"alone": other})["alone"]
    assert difference(alone, {"losses": losses[3:]}) <= 1e-10


def steps_in(said: str) -> list[int]:
    return [int(step) for step in re.findall(r"^step (\d+)/\d+  ", said, re.MULTILINE)]


@pytest.mark.slow
def test_sigterm_to_torchrun_with_data_workers_saves_a_step(
    cluster: Cluster, tmp_path: Path, unbroken: Notes
) -> None:
    """As SLURM and Kubernetes end a job; the next start is on other ranks."""
    folder = tmp_path / "ended"
    process = subprocess.Popen(
        [*torchrun(tmp_path, 2), SCRIPT, *everything(folder), "--num-workers", "2"],
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    before = ""
    for line in process.stdout:
        before += line
        if line.startswith("step 2/"):
            os.kill(process.pid, signal.SIGTERM)
            break
    after, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    last = max(steps_in(before + after))
    assert 2 <= last < STEPS, after
    assert (folder / f"step-{last}.json").is_file()
    goes_on(cluster, folder, unbroken, last=last)


@pytest.mark.slow
def test_mine_with_the_solutions_copied_in_is_bit_equal(
    cluster: Cluster, tmp_path: Path
) -> None:
    course = Course(tmp_path)
    for one in load_curriculum(ROOT).units.values():
        shutil.copy(one.solution(ROOT), one.template(course.root))
    flags = [*SMALL, "--epochs", "2"]
    cases = {code: [*flags, "--code", code] for code in ("mine", "reference")}
    run = cluster.run(play_code_of, 2, str(course.root), cases, limits=LIMITS)
    found = run.require_finished().values[0]
    assert len(found["mine"]["losses"]) == 8
    assert found["mine"] == found["reference"]


# ── one process: checkpoints, records, images ───────────────────────────────────────

Main = Callable[..., int]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Main:
    """The command, in this process."""
    for name in ("RANK", "SLURM_PROCID", "DISTLAB_IMPL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(ROOT)

    def run(*flags: object) -> int:
        import distlab.distributed as dist

        line = ["imagenet_trainer.py", *SMALL, *map(str, flags)]
        monkeypatch.setattr(sys, "argv", line)
        forget("reference")
        try:
            return int(unit("imagenet_trainer").main())
        finally:  # a Notice has blocked the signal
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            dist.destroy_process_group()
            forget()

    return run


def rows_in(folder: Path) -> list[dict[str, float]]:
    """Those of steps, without the evaluations."""
    lines = (folder / "figures.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def test_the_end_is_saved_and_records_go_on(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command again, as a queue does it: nothing is recorded twice."""
    saved, records = tmp_path / "saved", tmp_path / "records"
    flags = ["--epochs", "2", "--save-every", "2", "--log-every", "1"]
    flags += ["--checkpoint", str(saved), "--records", str(records)]
    assert main(*flags, "--max-steps", "3") == 0
    figures = records / "figures.jsonl"
    # As if the process had been killed in step 5, after the checkpoint of step 3.
    with figures.open("a") as file:
        file.write('{"step": 4, "loss": 9.9}\n{"step": 5, "l')
    assert main(*flags) == 0
    assert [row["step"] for row in rows_in(records)] == list(range(1, 9))
    assert 9.9 not in [row["loss"] for row in rows_in(records)]
    assert (saved / "step-8.json").is_file()
    capsys.readouterr()
    assert main(*flags, "--max-steps", "7") == 0
    said = capsys.readouterr().out
    assert steps_in(said) == []
    assert re.search(r"--max-steps 7: .* 8\b", said)
    assert len(rows_in(records)) == 8


def test_what_an_operator_sees(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Start, look, corrupt the newest checkpoint, start again, look."""
    saved, records = tmp_path / "saved", tmp_path / "one"
    flags = ["--epochs", "2", "--save-every", "2", "--log-every", "2"]
    flags += ["--checkpoint", str(saved), "--monitor", str(records)]
    assert main(*flags, "--max-steps", "6", "--also", "prometheus:0") == 0
    first = capsys.readouterr().out
    assert re.match(r"model narrow_resnet18, [\d,]{7}\D.*\b96 images, 4 steps", first)
    assert re.search(r"^1 rank on cpu, engine scratch over gloo, fp32", first, re.M)
    assert re.search(r"\bhttp://127.0.0.1:\d+/metrics$", first, re.MULTILINE)
    step = r"step 6/6  epoch 2/2  loss [\d.]+  [\d,]+ images/s  \d+ ms a step  lr "
    assert re.search(rf"^{step}0\.0\d+  ETA 0\.0 s$", first, re.MULTILINE)
    assert re.search(r"^step 2/6  .*  lr 0\.09\d+  ETA \d", first, re.MULTILINE)
    assert re.findall(r"\bsaved step (\d+)\b", first) == ["2", "4", "6"]
    assert re.search(r"^epoch 1/2  accuracy 0\.\d{4}  loss", first, re.MULTILINE)
    (shard,) = saved.glob("step-6.rank-0.*")
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main(*flags) == 0
    said = capsys.readouterr().out
    assert said.index(shard.name) < said.index(f"step 4 from {saved}")
    assert steps_in(said) == [6, 8]
    assert re.findall(r"\bsaved step (\d+)\b", said) == ["6", "8"]
    recorded = read_folder(records)
    assert (recorded.run["job"], recorded.run["world_size"]) == ("one", 1)
    rows = recorded.records[0]
    assert [(row.step, row.epoch, row.samples) for row in rows] == [
        (step, 1 + (step > 4), 48) for step in (2, 4, 6, 8)
    ]
    assert {row.learning_rate for row in rows} > {0.0}
    assert max(row["validation_accuracy"] for row in recorded.figures[-1:]) > 0
    top = CliRunner().invoke(app, ["top", "--once", str(records)])
    assert top.exit_code == 0
    assert re.search(r"^one · digits · 1 rank · epoch 2 of 2 · step 8 ", top.output)


def test_folders_of_another_run_are_refused(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    saved, records = tmp_path / "saved", tmp_path / "records"
    flags = ["--max-steps", "2", "--log-every", "1", "--records", str(records)]
    assert main(*flags, "--checkpoint", saved) == 0
    before = (records / "figures.jsonl").read_text()
    capsys.readouterr()
    assert main(*flags, "--checkpoint", tmp_path / "other") == 2
    other_run = capsys.readouterr().err
    assert f"{records} " in other_run
    assert (records / "figures.jsonl").read_text() == before
    flags = ["--max-steps", "3", "--model", "narrow_vit"]
    assert main(*flags, "--checkpoint", saved) == 2
    other_model = capsys.readouterr().err
    assert (other_run + other_model).count("\n") == 2
    golden("trainer/folders_of_another_run", other_run + other_model)


@pytest.mark.slow
def test_a_folder_of_images(cluster: Cluster, main: Main, tmp_path: Path) -> None:
    """Two processes, each with one that decodes; the images are the digits."""
    image = pytest.importorskip("PIL.Image", reason="pip install pillow")
    digits = load_digits_split()
    for split, first in (("train", 0), ("val", 30)):
        for place in range(first, first + 30):
            folder = tmp_path / split / str(int(digits.train_targets[place]))
            folder.mkdir(parents=True, exist_ok=True)
            pixels = (digits.train_inputs[place].view(8, 8) * 255).byte().numpy()
            image.fromarray(pixels).resize((20, 20)).save(folder / f"{place}.png")
    flags = "--image-size 16 --global-batch-size 10 --num-workers 1 --num-classes 10"
    flags += f" --code reference --data {tmp_path}"
    notes = played(cluster, 2, {"images": flags.split()})["images"]
    assert len(notes["losses"]) == 3
    assert main(*flags.split(), "--num-samples", 0, "--num-classes", 11) == 2
