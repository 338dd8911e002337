"""Mistakes that only stage 3 of ZeRO has, by name: memory that is gone, or is not."""

from __future__ import annotations

from typing import Any

from distlab.grading.checks.sharded_optimizer import layers
from distlab.grading.kit.live_bytes import FreedMemoryError
from distlab.grading.runs import Runs, Scenario
from distlab.grading.verdict import NotYetError
from distlab.runner import Run
from distlab.runner.autopsy import own_frame, place

FREED = "freed-under-a-view"
NOT_UPDATED = "shard-not-in-optimizer"
IN_BETWEEN = (
    "flat has memory from allocate() to free(); use it and its views, the parameters "
    "too, in between only"
)


def finished_run(runs: Runs, scenario: Scenario, **values: Any) -> Run:
    """`runs.finished`, with names for what can go wrong at this stage.

    Raises:
        NotYetError: the run did not end well, or a shard has no memory.
    """
    try:
        run = runs.finished(scenario, **values)
    except NotYetError as failure:
        raise _named(failure) from failure
    for record in run.ranks:
        if lost := record.value.get("lost"):
            raise _lost(record.rank, *lost[0])
    return run


def _lost(rank: int, name: str, how: str) -> NotYetError:
    if how == layers.OTHER:
        return NotYetError(
            f"after shard_bucket, the shard of {name} on rank {rank} isn't the "
            "parameter that the optimizer has, expected the same one",
            slug=NOT_UPDATED,
            rule="give the same parameter its own memory: bucket.shard.data = …",
            fatal=True,
        )
    is_view = how == layers.VIEW
    why = "a view of bucket.flat, which was freed" if is_view else "freed"
    return NotYetError(
        f"after shard_bucket, the shard of {name} on rank {rank} has no memory: it is "
        f"{why}",
        slug=FREED,
        rule="detach() and chunk() return views of the same memory; the shard needs a "
        "copy",
        fatal=True,
    )


def _named(failure: NotYetError) -> NotYetError:
    run = failure.run
    if run is None:
        return failure
    freed = [
        r.error
        for r in run.ranks
        if r.error and r.error.type == FreedMemoryError.__name__
    ]
    if freed:
        where = place(own_frame(freed[0].frames)).rpartition("/")[2]
        at = f", at {where}" if where else ""
        message = "bucket.flat, or a view of it, is used after its memory was freed"
        return failure.but(message=message + at, slug=FREED, rule=IN_BETWEEN)
    if failure.slug == "never-waited" and (wrong := _wrong_way(run)):
        return failure.but(message=wrong[0], slug=wrong[1], rule=WAY)
    return failure


WAY = "backward() goes from the last layer to the first: next is number - 1"


def _wrong_way(run: Run) -> tuple[str, str] | None:
    """Message and slug, if backward() asks for the layer that it has come from."""
    for record in run.ranks:
        for step in record.value.get("steps", ()):
            for number, following in step["ahead"]:
                if 0 < number < following < len(layers.WIDTHS) - 1:
                    return (
                        f"in backward(), layer {number} prefetches layer {following}, "
                        f"which is already done, expected layer {number - 1}",
                        "wrong-layer-prefetched",
                    )
    return None


def play_ahead(runs: Runs) -> None:
    """Steps with prefetch, to see in which order the layers are fetched.

    Raises:
        NotYetError: it is the wrong one.
    """
    run = finished_run(runs, layers.train_stage3, prefetch=True)
    if wrong := _wrong_way(run):
        raise NotYetError(wrong[0], slug=wrong[1], rule=WAY)


def expect_next_ahead(run: Run) -> None:
    """In forward, every layer but the last says that the layer after it is next.

    Raises:
        NotYetError: it names another one, which prefetching would gather.
    """
    for record in run.ranks:
        for number, following in record.value["ahead"]:
            if following != number + 1 < len(layers.WIDTHS) - 1:
                raise NotYetError(
                    f"in forward, layer {number} calls unshard_layer({number}, "
                    f"{following}), expected {number + 1} as the next layer",
                    rule="forward goes from the first layer to the last: next is "
                    "number + 1",
                )


def kept_before(run: Run, step: int) -> NotYetError | None:
    """The verdict on wrong weights after `step` if old ones were there before it."""
    if wrong := _wrong_way(run):
        return NotYetError(wrong[0], slug=wrong[1], rule=WAY)
    kept = [value["steps"][step - 1]["kept"] if step else 0 for value in run.values]
    if not max(kept):
        return None
    return NotYetError(
        f"after step {step + 1}, the weights are wrong: its forward used weights that "
        f"were still unsharded since backward() of step {step}",
        slug="layers-not-freed",
        evidence=[
            (rank, "kept", f"{count} bytes of unsharded weights")
            for rank, count in enumerate(kept)
        ],
        rule="free a layer's weights after its backward(); the next forward gathers "
        "the new weights",
    )
