"""Trains on warm ranks, with one set of flags after another, and notes what came of it.

    found = cluster.run(play, 2, {"a name": flags}).require_finished().values
    found[rank]["a name"]["losses"]

A rank that should get a signal in a step sends it to itself: the step is certain then.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distlab.distributed import parts
from distlab.distributed.job import build, use_code
from distlab.distributed.parts import unit
from distlab.given.imagenet_trainer import Job
from distlab.grading.kit.torchrun_env import like_torchrun
from distlab.recipe.options import read_options
from distlab.runner import RankContext

PATIENCE_S = 120.0
Notes = dict[str, Any]
"""The losses, the digests of this rank's samples, the weights, the code of an exit."""


def trained(flags: list[str], at_step: Callable[[int], None] | None = None) -> Notes:
    """Train in this process, as one of the ranks that its environment names."""
    options = read_options(flags)
    use_code(options.code)
    trainer = unit("imagenet_trainer")
    notes: Notes = {"losses": [], "samples": [], "weights": None, "exit": 0}
    take_step, checksum = trainer.train_step, trainer.checksum

    def step(*given: Any) -> float:
        if at_step:
            at_step(len(notes["losses"]) + 1)
        notes["losses"].append(take_step(*given))
        return float(notes["losses"][-1])

    def built(*given: Any) -> Job:
        job = build(*given)

        def prepare(images: Tensor, targets: Tensor, epoch: int) -> Any:
            for image in images:
                digest = hashlib.sha256(image.double().numpy().tobytes()).hexdigest()
                notes["samples"].append(f"{epoch} {digest}")
            return job.prepare(images, targets, epoch)

        return replace(job, prepare=prepare)

    def summed(parameters: Any) -> int:
        notes["weights"] = checksum(parameters)
        return int(notes["weights"])

    trainer.build, trainer.train_step, trainer.checksum = built, step, summed
    try:
        trainer.train(options)
    except SystemExit as ended:
        notes["exit"] = ended.code
    torch._dynamo.reset()
    return notes


def play(context: RankContext, cases: dict[str, list[str]]) -> dict[str, Notes]:
    """Each case on these ranks, one after another."""
    like_torchrun(context, PATIENCE_S)
    return {name: trained(flags) for name, flags in cases.items()}


def play_code_of(
    context: RankContext, course_root: str, cases: dict[str, list[str]]
) -> dict[str, Notes]:
    """The same, with the units of another copy of the course."""
    parts.forget(root=Path(course_root))
    return play(context, cases)


def play_signal(
    context: RankContext, flags: list[str], rank: int, step: int, number: int
) -> Notes:
    """Send a signal to one rank at the beginning of a step."""
    like_torchrun(context, PATIENCE_S)

    def at_step(now: int) -> None:
        if (context.rank, now) == (rank, step):
            os.kill(os.getpid(), number)

    return trained(flags, at_step)
