"""The trainer: its options, and what it refuses."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from distlab.curriculum import find_root
from distlab.distributed.parts import forget, unit
from distlab.recipe.options import (
    FILES,
    Options,
    read_options,
    read_recipe,
)

ROOT = find_root(Path(__file__))


# ── options ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--engine ddp --compression top_k", "only scratch has compression hooks"),
        ("--precision fp64 --compression int8", "compressed gradients are float32"),
        ("--backend tcp --engine fsdp2", "torch's engines need gloo or nccl"),
        ("--model narrow_vit --channels-last", "only the ResNets"),
        ("--model narrow_vit --smallest-image 4", "a ViT has one image size"),
        ("--smallest-image 4", "narrow_resnet18: it takes 8 pixels or more"),
        ("--engine fsdp2 --precision fp16", "choose bf16"),
        ("--engine fsdp2 --optimizer lars", "whole layers"),
        ("--epochs 2 --warmup-epochs 2", "the warm-up leaves no step"),
        ("--optimizer adam", "choose one of sgd, adamw, lars, lamb"),
        ("--lr -1", "--lr -1.0: "),
        ("--lr nan", "--lr nan: "),
        ("--ema 1", "--ema 1.0: "),
        ("--step-epochs -1", "--step-epochs -1.0: "),
        ("--warmup-factor nan", "--warmup-factor nan: "),
        ("--clip-norm 0", "must be positive"),
        ("--clip-norm inf", "must be positive"),
        ("--norm-weight-decay nan", "at least 0"),
        ("--norm-weight-decay -1", "at least 0"),
        ("--global-batch-size 0", "--global-batch-size 0: "),
        ("--epochs two", "invalid int value: 'two'"),
        ("--epoch 2", "unrecognized arguments: --epoch 2"),
        ("--recipe nowhere", "--recipe nowhere: "),
    ],
)
def test_options_that_are_wrong_are_one_line(flags: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        read_options(flags.split())
    assert "\n" not in str(caught.value)


def test_flags_count_before_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[train]\nlr = 1\nepochs = 7\nchannels_last = true\n")
    options = read_options(["--recipe", str(recipe), "--epochs", "3"])
    assert (options.lr, options.epochs, options.channels_last) == (1, 3, True)
    assert read_options(["--recipe", str(recipe), "--no-channels-last"]).lr == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[train]\nlearning_rate = 1", "unknown option 'learning_rate'"),
        ("[train]\nepochs = 1.5", "epochs is 1.5, expected a int"),
        ("[train]\nepochs = true", "epochs is True, expected a int"),
        ("[train\n", "--recipe"),
        ("lr = 1", "--recipe"),
    ],
)
def test_a_wrong_recipe_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        read_options(["--recipe", str(tmp_path / "mine.toml")])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "path", sorted(FILES.glob("*.toml")), ids=lambda path: path.stem
)
def test_recipes_that_are_shipped_can_be_used_and_say_that_they_were_not_run(
    path: Path,
) -> None:
    options = Options(**read_recipe(path.stem))
    assert options.num_classes == 1000
    assert "was_run = false" in path.read_text()


def test_ranks_need_samples() -> None:
    options = read_options(["--global-batch-size", "10", "--grad-accum-steps", "4"])
    options.check_ranks(2)
    with pytest.raises(ValueError, match=r"\b3 3\b.*\b4\b"):
        options.check_ranks(3)


# ── refusals of a run: one process, no launcher ─────────────────────────────────────


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> object:
    for name in ("RANK", "SLURM_PROCID", "DISTLAB_IMPL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(ROOT)

    def run(flags: str) -> int:
        monkeypatch.setattr(sys, "argv", ["imagenet_trainer.py", *flags.split()])
        forget("reference")
        try:
            code: int = unit("imagenet_trainer").main()
            return code
        finally:
            import distlab.distributed as dist

            dist.destroy_process_group()
            forget()

    return run


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--data nowhere", "--data nowhere"),
        ("--num-classes 7", "--num-classes 7: digits has 10 classes"),
        ("--num-samples 9999", "the set has 1437 to train on"),
        ("--model resnet18", "32 × 32 pixels or more, not 8"),
        ("--global-batch-size 2000", "there are 1437 samples to train on"),
        ("--engine ddp --compression top_k", "only scratch"),
    ],
)
def test_a_run_that_cannot_be_is_one_line(
    main: object, capsys: pytest.CaptureFixture[str], flags: str, says: str
) -> None:
    assert main(f"{flags} --code reference") == 2  # type: ignore[operator]
    said = capsys.readouterr().err
    assert said.startswith("imagenet_trainer: ")
    assert said.count("\n") == 1
    assert says in said
