"""`distlab demo`: several processes train together and end with one process's weights.

Every figure on the screen is measured while you watch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distlab.cli.demo_library import demo_library
from distlab.cli.demo_mesh import demo_mesh
from distlab.cli.demo_monitor import search
from distlab.cli.demo_recovery import demo_recovery
from distlab.cli.screen import (
    command,
    processes,
    say_aloud,
    say_nothing,
    show,
    show_json,
    warn,
)

if TYPE_CHECKING:  # both import torch, and the first line should not wait for it
    from distlab.training.digits import DigitsConfig, DigitsResult, Proof, Shard

MAX_RANKS = 64
_BATCH = 64  # of all ranks together, or the next smaller number that they can share
_EPOCHS = 20
_MESH_RANKS = 4


def demo(
    *,
    world_size: int = 4,
    epochs: int | None = None,
    as_json: bool = False,
    code: str = "reference",
    phase: int = 1,
) -> int:
    """Train on ranks and alone; return 0 if equal, 1 if not, 11 if it can't run.

    If you pass `epochs`, we don't require any accuracy, as they may be too few.

    Raises:
        ValueError: an invalid number of ranks or epochs, or no such phase.
    """
    if phase != 1:
        return _later_phase(phase, world_size, epochs, as_json, code)
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"{world_size} ranks: choose between 1 and {MAX_RANKS}")
    if epochs is not None and epochs < 1:
        raise ValueError(f"{epochs} epochs: choose at least 1")
    say = say_nothing if as_json else say_aloud
    say(
        f"{processes(world_size)} learn to read handwritten digits together. Then a "
        "single process\nruns the same training by itself. Do they end up with the "
        "same weights?\n"
    )
    from distlab.runner import RunnerError
    from distlab.training.digits import DigitsConfig, compare, train_alone
    from distlab.training.proof import ACCURACY_FLOOR

    config = DigitsConfig(
        world_size=world_size,
        epochs=epochs or _EPOCHS,
        global_batch_size=_BATCH - _BATCH % world_size,
        code=code,
    )
    try:
        on_ranks = _on_ranks(config, say, quiet=as_json)
    except RunnerError as error:
        say_aloud("")  # the live line has no end of its own
        warn(f"the ranks did not finish: {error}; {_who_knows(code)}")
        return 11 if code == "reference" else 1
    alone = train_alone(config)
    floor = ACCURACY_FLOOR if epochs is None else 0.0
    proof = compare(on_ranks, alone, accuracy_floor=floor)
    if as_json:
        show_json(_as_data(on_ranks, alone, proof))
    else:
        _tell(on_ranks, alone, proof)
    return 0 if proof.holds else 1


def _later_phase(
    phase: int, world_size: int, epochs: int | None, as_json: bool, code: str
) -> int:
    if phase == 3:
        return demo_library(
            world_size=world_size, epochs=epochs, code=code, as_json=as_json
        )
    if phase not in (2, 4):
        raise ValueError(f"phase {phase} has no demo: choose 1, 2, 3 or 4")
    if world_size != _MESH_RANKS or epochs is not None:
        what = {2: "2 × 2 ranks", 4: "64 simulated ranks and 3 real ones"}[phase]
        raise ValueError(
            f"the demo of phase {phase} always has {what}, so it takes neither -n nor "
            "--epochs"
        )
    if phase == 2:
        return demo_mesh(code=code, as_json=as_json)
    return _demo_phase4(code, as_json)


def _demo_phase4(code: str, as_json: bool) -> int:
    """Find three faults, and kill a process; with a file's code, only search."""
    searched, found = search(code=code, quiet=as_json)
    recovered, recovery = 0, dict[str, Any]()
    if code in ("mine", "reference"):
        show([("", "")] * (not as_json))
        recovered, recovery = demo_recovery(code=code, quiet=as_json)
    if as_json:
        show_json({"search": found, "recovery": recovery})
    return max(searched, recovered)


def _who_knows(code: str) -> str:
    if code == "reference":
        return f"`{command('doctor')}` may know why"
    return f"run `{command('check --phase 1')}` to see what isn't finished yet"


def _on_ranks(
    config: DigitsConfig, say: Callable[..., None], *, quiet: bool
) -> DigitsResult:
    from distlab.cli.training import LiveLine, shard_table
    from distlab.ranks import new_cluster
    from distlab.training.digits import PRELOADS, train_on_ranks

    line = LiveLine(config.epochs, quiet=quiet)

    def on_shards(shards: list[Shard]) -> None:
        line.clear()
        say(*shard_table(shards, head="its positions in the shuffled order"))

    line.say(f"  starting {processes(config.world_size)} …")
    with new_cluster(preload=PRELOADS) as cluster:
        result = train_on_ranks(
            cluster, config, on_shards=on_shards, on_moment=line.show
        )
    line.clear()
    return result


def _tell(on_ranks: DigitsResult, alone: DigitsResult, proof: Proof) -> None:
    from distlab.cli.training import kilobytes, table

    rows = [("1 process", alone, None), (_ranks(on_ranks), on_ranks, proof.difference)]
    show([("plain", line) for line in (*table(rows, timed=False), "")])
    if on_ranks.config.world_size > 1:
        share = 100 * on_ranks.communication
        say_aloud(
            f"  The ranks spent {share:.0f} % of their time on messages, and each "
            f"sent {kilobytes(on_ranks.step_bytes)} per step.",
            "",
        )
    if proof.holds:
        say = "  The result is the same as with one process."
        show([("pass", say), *_proven(on_ranks, proof)])
    else:
        show([("fail", "  The result is not the same as with one process:")])
        show([("fail", f"  {sentence}") for sentence in proof.failures()])
    if on_ranks.config.code == "reference":
        show([("", ""), ("", f"  Next: {command('start')}")])
    elif proof.holds:
        show([("", ""), ("pass", "  ◆ The ranks ran your own code.")])


def _proven(on_ranks: DigitsResult, proof: Proof) -> list[tuple[str, str]]:
    steps = f"After {on_ranks.num_steps} steps"
    if on_ranks.config.world_size == 1:
        held = f"  {steps}, the weights"
    else:
        held = f"  {steps}, all {_ranks(on_ranks)} have exactly the same weights. They"
    if proof.difference == 0:
        return [
            ("", f"{held}"),
            ("", "  equal the single process's weights, bit for bit."),
        ]
    apart = f"{proof.difference:.1e}"
    return [
        ("", f"{held} differ"),
        (
            "",
            f"  from the single process's weights by at most {apart}. This is rounding",
        ),
        ("", "  error, because splitting a batch changes the order of the additions."),
    ]


def _as_data(
    on_ranks: DigitsResult, alone: DigitsResult, proof: Proof
) -> dict[str, Any]:
    config = on_ranks.config
    return {
        "holds": proof.holds,
        "failures": proof.failures(),
        "world_size": config.world_size,
        "epochs": config.epochs,
        "global_batch_size": config.global_batch_size,
        "code": config.code,
        "difference": proof.difference,
        "digests": list(on_ranks.digests),
        "digest_alone": alone.digests[0],
        "accuracy": list(on_ranks.accuracies),
        "accuracy_alone": alone.accuracy,
        "epoch_s": on_ranks.epoch_s,
        "epoch_alone_s": alone.epoch_s,
        "communication": on_ranks.communication,
        "step_bytes": on_ranks.step_bytes,
        "pids": [shard.pid for shard in on_ranks.shards],
        "exit": 0 if proof.holds else 1,
    }


def _ranks(result: DigitsResult) -> str:
    count = result.config.world_size
    return "1 rank" if count == 1 else f"{count} ranks"
