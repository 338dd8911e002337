"""`distlab demo --phase 2`: split a transformer over 2 × 2 ranks.

First each layer is cut in two and the layers are cut into two stages; then two pairs of
ranks have a model each. Every figure on the screen is measured while you watch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distlab.cli.screen import (
    command,
    moves,
    processes,
    say_aloud,
    say_nothing,
    show,
    show_json,
    warn,
)

if TYPE_CHECKING:  # they import torch, and the first line should not wait for it
    from distlab.curriculum.choose import Choice
    from distlab.runner import Cluster
    from distlab.training.mesh import Layout, MeshConfig, MeshResult, Place

_PLAIN_EVERY = 20  # steps between two lines where a line cannot move
Results = dict[str, "MeshResult"]


def demo_mesh(
    *,
    code: str = "reference",
    as_json: bool = False,
    config: MeshConfig | None = None,
) -> int:
    """Train alone and twice on 2 × 2 ranks; 0 for equal losses, 1 if not, 11 if broken.

    Raises:
        ValueError: we can't read the file `code`, or it has none of the units.
    """
    say = say_nothing if as_json else say_aloud
    say(
        f"{processes(4)} learn to guess the next letter of a text. Two of them share "
        "every\nlayer of a transformer, and each holds half of it. In the first run, "
        "the other\ntwo hold the layers that follow, as a second pipeline stage. In "
        "the second run,\nthey hold the same layers and take half of the samples. Do "
        "both runs have the\nsame losses as a single process?\n"
    )
    from distlab.ranks import new_cluster
    from distlab.runner import RunnerError
    from distlab.training.mesh import LAYOUTS, PRELOADS, MeshConfig
    from distlab.training.mesh_code import UnfinishedError, choose_units

    config = config or MeshConfig()
    try:
        units = choose_units(code)
    except UnfinishedError as error:
        use = command(f"use reference {error.number}")
        warn(f"{error}; to run the reference's code for it: `{use}`")
        return 1
    say(*_whose(units))
    with new_cluster(preload=PRELOADS) as cluster:
        cluster.start(wait=False)
        alone = _alone(config, say, quiet=as_json)
        results: Results = {}
        try:
            for layout in LAYOUTS:
                results[layout] = _on_mesh(
                    cluster, config, layout, units, alone, say, quiet=as_json
                )
        except RunnerError as error:
            say("")  # the live line has no end of its own
            warn(f"the ranks did not finish: {error}; {_who_knows(code)}")
            return 11 if code == "reference" else 1
    if as_json:
        show_json(_as_data(alone, results, code, units))
    else:
        _tell(alone, results, code)
    return int(bool(_failures(alone, results)))


def _who_knows(code: str) -> str:
    if code == "reference":
        return f"`{command('doctor')}` may know why"
    return f"run `{command('check --phase 2')}` to see what isn't finished yet"


def _whose(units: Mapping[str, Choice]) -> list[str]:
    from distlab.training.mesh_code import needed_parts

    parts = needed_parts(units)
    width = max((len(part.task) for part in parts), default=0)
    return [f"  {part.line(width)}" for part in parts] + [""] * bool(parts)


def _alone(config: MeshConfig, say: Callable[..., None], *, quiet: bool) -> MeshResult:
    from distlab.training.mesh import train_alone

    line = _Line(config.num_steps, quiet=quiet)
    alone = train_alone(config, on_step=lambda step, loss: line.show(step, loss))
    line.clear()
    (place,) = alone.places
    say(f"  1 process has all {place.weights:,} weights: loss {_span(alone)}", "")
    return alone


def _on_mesh(
    cluster: Cluster,
    config: MeshConfig,
    layout: Layout,
    units: dict[str, Choice],
    alone: MeshResult,
    say: Callable[..., None],
    *,
    quiet: bool,
) -> MeshResult:
    from distlab.training.mesh import WORLD_SIZE, train_on_mesh

    line = _Line(config.num_steps, quiet=quiet)
    places: list[Place] = []

    def on_place(place: Place) -> None:
        places.append(place)
        if len(places) == WORLD_SIZE:
            ordered = sorted(places, key=lambda place: place.rank)
            line.clear()
            say(*_place_table(layout, ordered))

    def on_step(step: int, loss: float) -> None:
        if len(places) == WORLD_SIZE:
            line.show(step, loss, alone.losses[0][step])

    result = train_on_mesh(
        cluster, config, layout, units, on_place=on_place, on_step=on_step
    )
    line.clear()
    say("")
    return result


class _Line:
    """A line that updates with the steps, or plain lines if the output can't."""

    def __init__(self, num_steps: int, *, quiet: bool) -> None:
        self._num_steps, self._quiet = num_steps, quiet

    def show(self, step: int, loss: float, expected: float | None = None) -> None:
        """Show the progress, and the distance from one process."""
        if self._quiet or not (moves() or step % _PLAIN_EVERY == 0):
            return
        text = f"  step {step + 1:>3} of {self._num_steps}   loss {loss:.4f}"
        if expected is not None:
            text += f"   one process {expected:.4f}   apart {abs(loss - expected):.0e}"
        print(f"\r{text}\x1b[K" if moves() else text, end="" if moves() else "\n")
        _flush()

    def clear(self) -> None:
        """Remove the moving line."""
        if moves() and not self._quiet:
            print("\r\x1b[K", end="")
            _flush()


def _flush() -> None:
    print(end="", flush=True)


def _place_table(layout: Layout, places: Sequence[Place]) -> list[str]:
    what = {"tensor × pipeline": "layers", "data × tensor": "samples"}[layout]
    order = ("first", "second")
    head = f"  {'rank':>4} {'pid':>9}    {'of each layer':<18}{'of the ' + what:<18}"
    rows = [
        f"  {place.rank:>4} {place.pid:>9}    {order[place.half] + ' half':<18}"
        f"{order[place.group] + ' half':<18}{place.weights:>8,}"
        for place in places
    ]
    return [f"  {layout}", f"{head}{'weights':>8}", *rows]


def _tell(alone: MeshResult, results: Results, code: str) -> None:
    from distlab.training.mesh import TOLERANCE, compare

    ranks = "".join(f"{f'rank {rank}':>8}" for rank in range(4))
    say_aloud(
        f"  {'':<18}{'':<16}{'largest':<11}{'kB sent in a step by':>32}",
        f"  {'':<18}{'loss':<16}{'difference':<11}{ranks}",
        f"  {'1 process':<18}{_span(alone)}",
    )
    for layout, result in results.items():
        apart = f"{compare(result, alone):.1e}"
        sent = "".join(f"{count / 1000:>8,.0f}" for count in result.step_bytes)
        say_aloud(f"  {layout:<18}{_span(result):<16}{apart:<11}{sent}")
    failures = _failures(alone, results)
    say_aloud("")
    if failures:
        show([("fail", "  The result is not the same as with one process:")])
        show([("fail", f"  {sentence}") for sentence in failures])
        return
    worst = max(compare(result, alone) for result in results.values())
    num_steps = len(alone.losses[0])
    show([("pass", "  The result is the same as with one process.")])
    say_aloud(
        f"  In all {num_steps} steps, every rank's loss is within {worst:.1e} of the",
        f"  single-process baseline ({TOLERANCE:.0e} is allowed). The difference is",
        "  rounding error, because the additions happen in a different order.",
        "",
    )
    if code == "reference":
        say_aloud(
            f"  Next: {command('status')}",
            "  To run your own functions, once you have passed 2.8 to 2.18:",
            f"    {command('demo --phase 2 --code mine')}",
        )
    else:
        show([("pass", "  ◆ Four ranks trained one transformer with the code above.")])
        say_aloud(f"  Next: {command('status')}")


def _failures(alone: MeshResult, results: Results) -> list[str]:
    from distlab.training.mesh import TOLERANCE, compare

    return [
        f"{layout}: a loss is off by {compare(result, alone):.1e}, but rounding "
        f"explains only {TOLERANCE:.0e}"
        for layout, result in results.items()
        if not compare(result, alone) <= TOLERANCE  # also when it is not a number
    ]


def _span(result: MeshResult) -> str:
    losses = result.losses[-1]
    return f"{losses[0]:.3f} → {losses[-1]:.3f}"


def _as_data(
    alone: MeshResult, results: Results, code: str, units: Mapping[str, Choice]
) -> dict[str, Any]:
    from distlab.training.mesh import TOLERANCE, compare
    from distlab.training.mesh_code import needed_parts

    failures = _failures(alone, results)
    return {
        "holds": not failures,
        "failures": failures,
        "code": code,
        "whose": {part.number: part.whose for part in needed_parts(units)},
        "tolerance": TOLERANCE,
        "losses_alone": list(alone.losses[0]),
        "step_alone_s": alone.step_s,
        "meshes": {
            layout: {
                "difference": compare(result, alone),
                "losses": [list(losses) for losses in result.losses],
                "step_bytes": list(result.step_bytes),
                "step_s": result.step_s,
                "weights": [place.weights for place in result.places],
                "pids": [place.pid for place in result.places],
            }
            for layout, result in results.items()
        },
        "exit": int(bool(failures)),
    }
