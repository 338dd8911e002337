"""`distlab demo --phase 3`: train on the digits with distlab.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distlab.cli.screen import (
    command,
    processes,
    say_aloud,
    say_nothing,
    show,
    show_json,
    warn,
)

if TYPE_CHECKING:  # they import torch, and the first line should not wait for it
    from distlab.curriculum.choose import Part
    from distlab.runner import RunnerError
    from distlab.training.library import LibraryResult
    from distlab.training.proof import Proof

_EPOCHS = 20
_MAX_RANKS = 16


def demo_library(
    *, world_size: int, epochs: int | None, code: str, as_json: bool
) -> int:
    """Train on ranks and alone; return 0 for equal weights, 1 if not, 11 on failure.

    If you pass `epochs`, we don't require any accuracy, as they may be too few.

    Raises:
        ValueError: an invalid number of ranks or epochs, or code of one file.
    """
    if not 1 <= world_size <= _MAX_RANKS:
        raise ValueError(f"{world_size} ranks: choose between 1 and {_MAX_RANKS}")
    if epochs is not None and epochs < 1:
        raise ValueError(f"{epochs} epochs: choose at least 1")
    say = say_nothing if as_json else say_aloud
    say(
        f"{processes(world_size)} train on handwritten digits with "
        "distlab.distributed. It has its own\nDistributedDataParallel, sampler and "
        "collectives, and it runs over plain sockets.\nThen one process trains on the "
        "same batches. Do they end up with the same weights?\n"
    )
    from distlab.ranks import new_cluster
    from distlab.runner import RunnerError
    from distlab.training import library
    from distlab.training.proof import ACCURACY_FLOOR

    needed = library.needed_parts(code)
    width = max((len(part.task) for part in needed), default=0)
    say(*(f"  {part.line(width)}" for part in needed), *[""] * bool(needed))

    def on_epoch(epoch: int, loss: float) -> None:
        say(f"  epoch {epoch + 1:>2}   training loss {loss:.4f}")

    try:
        with new_cluster(preload=library.PRELOADS) as cluster:
            result = library.train_on_ranks(
                cluster, world_size, epochs or _EPOCHS, code, on_epoch
            )
    except RunnerError as error:
        warn(f"the ranks did not finish: {_of_unit(error) or error}")
        return 11 if code == "reference" else 1
    floor = ACCURACY_FLOOR if epochs is None else 0.0
    proof = library.compare(result, library.train_alone(result), floor)
    if as_json:
        show_json(_as_data(result, proof, code, needed))
    else:
        _tell(result, proof, code, needed)
    return 0 if proof.holds else 1


def _of_unit(error: RunnerError) -> str:
    """Return the full line about a task's code that raised an error, if any did."""
    run: Any = getattr(error, "run", None)
    errors = [record.error for record in run.ranks if record.error] if run else []
    lines = [found.message for found in errors if found.type == "UnitError"]
    return lines[0] if lines else ""


def _tell(
    result: LibraryResult, proof: Proof, code: str, needed: Sequence[Part]
) -> None:
    say_aloud("")
    if not proof.holds:
        show([("fail", "  The result is not the same as with one process:")])
        show([("fail", f"  {sentence}") for sentence in proof.failures()])
        return
    steps = sum(map(len, result.batches[0]))
    show([("pass", "  The result is the same as with one process.")])
    say_aloud(
        f"  After {steps} steps, {processes(len(result.weights))} have the weights "
        f"{proof.digests[0]}. They differ",
        f"  from the single process's weights by at most {proof.difference:.1e}. The "
        "accuracy on held-out",
        f"  digits is {100 * proof.accuracy:.1f} %.",
        "",
    )
    if code == "reference":
        say_aloud(f"  To run your own code: {command('demo --phase 3 --code mine')}")
        return
    mine = sum(part.whose == "mine" for part in needed)
    what = f"{mine} of its {len(needed)} tasks {'is' if mine == 1 else 'are'} yours"
    show([("pass", f"  ◆ Your library: {what}.")])


def _as_data(
    result: LibraryResult, proof: Proof, code: str, needed: Sequence[Part]
) -> dict[str, object]:
    return {
        "holds": proof.holds,
        "failures": proof.failures(),
        "code": code,
        "whose": {part.number: part.whose for part in needed},
        "world_size": len(result.weights),
        "losses": list(result.losses),
        "accuracy": proof.accuracy,
        "difference": proof.difference,
        "digests": list(proof.digests),
        "exit": 0 if proof.holds else 1,
    }
