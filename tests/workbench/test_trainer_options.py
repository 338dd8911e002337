"""Every option of the trainer has an effect or is refused: in a new run, and resumed.

OTHERS gives each option another value. What a run shows, from its losses to the files
that it leaves, must then differ from a run without it, or the command must refuse and
name the flag. A new option has no line here, and the first test says so.
"""

from __future__ import annotations

import re
import shutil
import signal
import sys
import types
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distlab.distributed as dist
from distlab.curriculum import find_root
from distlab.distributed import job
from distlab.distributed.parts import forget, unit
from distlab.given.imagenet_trainer import Job
from distlab.models.image_models import make_image_model
from distlab.recipe.options import Options, flag_of, read_options

ROOT = find_root(Path(__file__))
PLAIN = "--code reference --num-samples 48 --global-batch-size 24 --log-every 1"
"""Two steps in an epoch."""

OTHERS = {
    "recipe": ("", "--recipe {folder}/recipe.toml"),
    "data": (
        "--num-samples 0 --global-batch-size 4 --image-size 9 --max-steps 2",
        "--data {folder}/images",
    ),
    "num_samples": ("", "--num-samples 72"),
    "num_classes": ("", "--num-classes 7"),
    "image_size": ("", "--image-size 10"),
    "num_workers": ("", "--num-workers 1"),
    "model": ("", "--model narrow_vit"),
    "engine": ("", "--engine ddp"),
    "backend": ("", "--backend tcp"),
    "code": ("", "--code nobody"),
    "seed": ("", "--seed 5"),
    "epochs": ("", "--epochs 2"),
    "max_steps": ("", "--max-steps 1"),
    "global_batch_size": ("", "--global-batch-size 48"),
    "grad_accum_steps": ("", "--grad-accum-steps 2"),
    "optimizer": ("", "--optimizer adamw"),
    "lr": ("", "--lr 0"),
    "momentum": ("", "--momentum 0.5"),
    "weight_decay": ("", "--weight-decay 0.5"),
    "norm_weight_decay": ("", "--norm-weight-decay 0.5"),
    "schedule": ("", "--schedule constant"),
    "warmup_epochs": ("", "--warmup-epochs 0.5"),
    "warmup_factor": ("--warmup-epochs 0.5", "--warmup-factor 0.9"),
    "step_epochs": ("--schedule step", "--step-epochs 0.5"),
    "clip_norm": ("", "--clip-norm 0.001"),
    "label_smoothing": ("", "--label-smoothing 0.1"),
    "mixup": ("", "--mixup 1"),
    "cutmix": ("", "--cutmix 1"),
    "ema": ("", "--ema 0.5"),
    "smallest_image": ("--image-size 16", "--smallest-image 8"),
    "precision": ("", "--precision bf16"),
    "channels_last": ("", "--channels-last"),
    "compile": ("", "--compile"),
    "compression": ("", "--compression top_k"),
    "checkpoint": ("", "--checkpoint {folder}/another"),
    "save_every": ("--epochs 2 --checkpoint {folder}/saved", "--save-every 2"),
    "records": ("", "--records {folder}/records"),
    "also": ("", "--also prometheus:0"),
    "profile": ("", "--profile {folder}/profile"),
    "log_every": ("", "--log-every 3"),
}
"""What it takes for the option to matter, and the option with another value."""

ALONE_WITHOUT_EFFECT = {
    "momentum": ("--optimizer lamb", "--momentum 0.5"),
    "warmup_factor": ("", "--warmup-factor 0.5"),
    "step_epochs": ("", "--step-epochs 2"),
    "save_every": ("", "--save-every 2"),
    "also": ("", "--also tensorboard"),
}

Shown = dict[str, Any]
Run = Callable[..., tuple[int, Shown]]
Known = dict[tuple[str, str], Shown]


def test_every_option_is_tried() -> None:
    assert OTHERS.keys() == {field.name for field in fields(Options)}


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """The command in this process, in a folder that it may write: what it showed."""
    for name in ("RANK", "SLURM_PROCID", "DISTLAB_IMPL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(ROOT)
    jobs: list[Job] = []
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda model: compiled.append(model))

    build = job.build

    def built(*given: Any) -> Job:
        jobs.append(build(*given))
        return jobs[-1]

    # The command loads its units anew, after it has read --code.
    monkeypatch.setattr(job, "build", built)

    def run(folder: Path, *flags: str) -> tuple[int, Shown]:
        line = " ".join([PLAIN, *flags]).format(folder=folder).split()
        monkeypatch.setattr(sys, "argv", ["imagenet_trainer.py", *line])
        forget("reference")
        jobs.clear()
        compiled.clear()
        try:
            code = int(unit("imagenet_trainer").main())
        finally:  # a Notice has blocked the signal
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            dist.destroy_process_group()
            forget()
        said = capsys.readouterr()
        shown: Shown = {
            "said": re.sub(r"[\d.,]+ images/s.*ms|ETA .*", "", said.out),
            "err": said.err,
            "files": sorted(str(p.relative_to(folder)) for p in folder.rglob("*")),
            "compiled": len(compiled),
        }
        return code, shown | (_of_job(jobs[-1]) if jobs else {})

    return run


def _of_job(made: Job) -> Shown:
    loader: Any = made.loader
    while hasattr(loader, "loader"):
        loader = loader.loader
    comm: Any = made.comm
    engine: Any = made.engine
    convolutions = [p for p in made.model.parameters() if p.dim() == 4]
    return {
        "workers": getattr(loader, "num_workers", None),
        "engine": str(type(engine.engine)),
        "comm": type(comm._inner).__qualname__,
        "channels_last": any(
            p.is_contiguous(memory_format=torch.channels_last) and not p.is_contiguous()
            for p in convolutions
        ),
    }


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shelf")


@pytest.fixture(scope="module")
def known() -> Known:
    """What was shown without the option, by what there was instead."""
    return {}


def prepared(folder: Path) -> Path:
    """With a recipe and images."""
    image = pytest.importorskip("PIL.Image", reason="pip install pillow")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.toml").write_text("[train]\nmax_steps = 1\n")
    for place in range(20):
        path = folder / "images" / ("val" if place % 2 else "train") / str(place // 10)
        path.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (9, 9)).save(path / f"{place}.png")
    return folder


def expect_effect(name: str, flags: str, now: tuple[int, Shown], plain: Shown) -> None:
    code, shown = now
    if code:
        assert code == 2
        assert shown["err"].startswith("imagenet_trainer: ")
        assert shown["err"].count("\n") == 1
        assert flag_of(name) in shown["err"] or flags.split()[1] in shown["err"]
    else:
        assert shown != plain


@pytest.mark.parametrize("name", OTHERS)
def test_an_option_has_an_effect_in_a_new_run(
    name: str, run: Run, tmp_path: Path, known: Known
) -> None:
    with_it, other = OTHERS[name]
    if ("new", with_it) not in known:
        code, known["new", with_it] = run(prepared(tmp_path / "plain"), with_it)
        assert code == 0
    now = run(prepared(tmp_path / "other"), with_it, other)
    expect_effect(name, other, now, known["new", with_it])


@pytest.mark.parametrize("name", OTHERS)
def test_an_option_has_an_effect_in_a_run_that_goes_on(
    name: str,
    run: Run,
    tmp_path: Path,
    shelf: Path,
    known: dict[tuple[str, str], Shown],
) -> None:
    with_it, other = OTHERS[name]
    saves = "--checkpoint {folder}/saved"
    flags = with_it if saves in with_it else f"{with_it} {saves}"
    saved = shelf / (re.sub(r"\W", "", with_it) or "plain")
    if ("resumed", with_it) not in known:
        assert run(prepared(saved), flags, "--max-steps 1")[0] == 0
        shutil.copytree(saved, tmp_path / "plain")
        code, known["resumed", with_it] = run(tmp_path / "plain", flags)
        assert code == 0
        assert "step 1/" not in known["resumed", with_it]["said"]
    shutil.copytree(saved, tmp_path / "other")
    now = run(tmp_path / "other", flags, other)
    expect_effect(name, other, now, known["resumed", with_it])


@pytest.mark.parametrize("name", ALONE_WITHOUT_EFFECT)
def test_an_option_that_needs_another_is_refused_alone(
    name: str, tmp_path: Path
) -> None:
    without, other = ALONE_WITHOUT_EFFECT[name]
    with pytest.raises(ValueError, match=rf"^{flag_of(name)} .* --"):
        read_options(f"{without} {other}".split())
    recipe = tmp_path / "mine.toml"
    lines = "optimizer = 'lamb'\n" if "lamb" in without else ""
    given = other.split()[1]
    value = given if given[0].isdigit() else repr(given)
    recipe.write_text(f"[train]\n{lines}{name} = {value}\n")
    with pytest.raises(ValueError, match=rf"^{flag_of(name)} .* --"):
        read_options(["--recipe", str(recipe)])


def test_help_lists_choices_and_torchvisions_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown() -> str:
        with pytest.raises(SystemExit):
            read_options(["--help"])
        return " ".join(capsys.readouterr().out.split())

    monkeypatch.setitem(sys.modules, "torchvision", None)  # as if not installed
    without = shown()
    for one in fields(Options):
        assert f"{flag_of(one.name)}" in without
        assert ", ".join(one.metadata["choices"]) in without
    assert "pip install torchvision" in without
    monkeypatch.setitem(sys.modules, "torchvision", torchvision())
    assert "one_net, two_net" in shown()


def torchvision() -> types.ModuleType:
    """As much of torchvision as the trainer uses."""

    def get_model(name: str, *, weights: None, num_classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))

    module, models = types.ModuleType("torchvision"), types.ModuleType("models")
    module.models = models  # type: ignore[attr-defined]
    models.list_models = lambda module: ["two_net", "one_net"]  # type: ignore[attr-defined]
    models.get_model = get_model  # type: ignore[attr-defined]
    return module


def test_a_model_of_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_options(["--model", "torchvision/one_net"]).model.endswith("one_net")
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ValueError, match=r"torchvision/one_net .* pip install"):
        make_image_model("torchvision/one_net", num_classes=7)
    monkeypatch.setitem(sys.modules, "torchvision", torchvision())
    model = make_image_model("torchvision/one_net", num_classes=7, seed=1)
    assert model(torch.zeros(2, 3, 4, 4)).shape == (2, 7)
    with pytest.raises(ValueError, match="torchvision/one_net"):
        make_image_model("torchvision/one_nett", num_classes=7)
    with pytest.raises(ValueError, match=r"\b3 channels.*\b1$"):
        make_image_model("torchvision/one_net", num_classes=7, in_channels=1)
