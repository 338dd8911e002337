"""Check of task 1.10 C1, `data_loader.loader`: the ranks' batches, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distlab.grading.checks.data_loader.steps import (
    CHANGES,
    EPOCHS,
    RANKS,
    SAMPLES,
    Batches,
    work_out_batches,
)
from distlab.grading.clause import clause
from distlab.grading.kit.plans import (
    Plan,
    listed,
    named,
    on,
    times,
    worked_out,
)
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner.autopsy import Evidence
from distlab.terminal import enumerated


@clause("data_loader.loader", "C1", worlds=(1,), runs=[on_ranks(work_out_batches)])
def steps_are_those_of_one_process(runs: Runs) -> str | None:
    """Together one process's batch in every step, in parts of equal size."""
    cases = worked_out(runs, work_out_batches).values[0]
    for case in cases:
        (alone,) = _readable(case, 1)
        failure = _one_process(case["samples"], case["size"], alone)
        if failure:
            raise failure
    for case in cases:
        (alone,) = _readable(case, 1)
        for n in RANKS:
            failure = _together(case, alone, _readable(case, n))
            if failure:
                raise failure
    (alone,) = cases[0]["plans"][1]
    if [number for batch in alone for number in batch] == list(range(SAMPLES[0][0])):
        raise NotYetError(
            f"{on(SAMPLES[0][0], 1)}, the batches have the samples in their own order, "
            "0 1 2 …, expected them shuffled",
            evidence=_steps([alone]),
            rule="self._order() is the shuffle of this epoch",
        )
    if cases[0]["plans"][1] == cases[1]["plans"][1]:
        raise NotYetError(
            f"{on(SAMPLES[0][0], 1)}, epoch 1 has the batches of epoch 0, expected "
            "another shuffle",
            slug="epoch-ignored",
            rule="self._order() is the shuffle of this epoch",
        )
    (alone,) = cases[-1]["plans"][1]
    if [number for batch in alone for number in batch] != list(range(SAMPLES[0][0])):
        raise NotYetError(
            "with shuffle=False, the batches don't have the samples in their own "
            "order, expected 0 1 2 …",
            evidence=_steps([alone]),
            rule="self._order() is the order of this epoch, shuffled or not",
        )
    sizes = ", ".join(map(str, RANKS))
    data = len(cases) // EPOCHS
    return f"{data} data sets in {EPOCHS} epochs, on 1, {sizes} ranks"


def _readable(case: dict[str, Any], n: int) -> list[Batches]:
    for rank, batches in enumerate(case["plans"][n]):
        if isinstance(batches, str):
            raise NotYetError(
                f"{on(case['samples'], n)}, batches() on rank {rank} {batches}",
                slug="not-reproducible" if batches == CHANGES else "",
                rule="return one list of sample numbers for each step",
                fatal=True,
            )
    return case["plans"][n]  # type: ignore[no-any-return]


def _one_process(num_samples: int, size: int, alone: Batches) -> NotYetError | None:
    """Of a single rank: full batches, the rest in the last one, every sample once."""
    setting = _setting(num_samples, 1, size)
    sizes = list(map(len, alone))
    full, rest = divmod(num_samples, size)
    evidence = _steps([alone])
    if rest and sizes == [size] * full:
        return NotYetError(
            f"{setting}, the last, smaller batch of {rest} is missing, expected "
            f"{full + 1} batches",
            slug="last-batch-dropped",
            evidence=evidence,
            rule="keep the last batch of an epoch, even if it is smaller",
        )
    everything = sorted(number for batch in alone for number in batch)
    if everything != list(range(num_samples)):
        wrong = _odd_one(everything, num_samples)
        return NotYetError(
            f"{setting}, {wrong}",
            evidence=evidence,
            rule="an epoch has every sample once",
        )
    if sizes != [size] * full + [rest] * bool(rest):
        return NotYetError(
            f"{setting}, the batches have {listed(sizes)} samples, expected "
            f"{listed([size] * full + [rest] * bool(rest))}",
            evidence=evidence,
            rule=f"steps of {size} samples, and the remaining samples in the last step",
        )
    return None


def _odd_one(everything: list[int], num_samples: int) -> str:
    for number in range(num_samples):
        count = everything.count(number)
        if count != 1:
            often = f"{times(count)} in" if count else "in none of"
            return f"sample {number} is {often} the batches, expected every sample once"
    odd = max(everything)
    return f"the batches have sample {odd}, expected only 0 to {num_samples - 1}"


def _setting(num_samples: int, n: int, size: int) -> str:
    return f"{on(num_samples, n)} and global_batch_size={size}"


# ── several ranks against one process ───────────────────────────────────────────────


def _together(
    case: dict[str, Any], alone: Batches, plans: list[Batches]
) -> NotYetError | None:
    num_samples, size, n = case["samples"], case["size"], len(plans)
    setting = _setting(num_samples, n, size)
    first = [len(plan[0]) if plan else 0 for plan in plans]
    if first == [size] * n and size < num_samples:
        return _too_large(plans, alone, setting, size)
    failure = _shared_out_first(plans, alone, setting, size)
    failure = failure or _loops_end_together(plans, alone, setting)
    if failure:
        return failure
    for step, batch in enumerate(alone):
        parts = [plan[step] for plan in plans]
        failure = _unlike(parts, batch, f"in step {step} {setting}", plans, alone)
        if failure:
            return failure
    return None


def _too_large(
    plans: list[Batches], alone: Batches, setting: str, size: int
) -> NotYetError:
    together = {number for plan in plans for number in plan[0]}
    if len(together) == size:
        return NotYetError(
            f"{setting}, every rank takes the full global batch, expected each rank to "
            "take one shard of it",
            slug="not-sharded",
            evidence=_steps(plans),
            rule="shard each global batch: every rank has one shard of it",
        )
    return NotYetError(
        f"{setting}, each rank takes {size} samples in a step, {size * len(plans)} "
        f"in all, expected {size} in all",
        slug="batch-grows-with-ranks",
        evidence=_steps(plans),
        rule="global_batch_size counts the samples of all ranks together",
    )


def _shared_out_first(
    plans: list[Batches], alone: Batches, setting: str, size: int
) -> NotYetError | None:
    """Each rank has a part of the whole order, which it cut afterwards."""
    n = len(plans)
    if size % n == 0 or len(alone) == 1:
        return None  # every n-th of the order is then every n-th of each batch
    order = [number for batch in alone for number in batch]
    own = [[number for batch in plan for number in batch] for plan in plans]
    total = -(-len(order) // n) * n
    padded = [order[place % len(order)] for place in range(total)]
    ways = (
        [order[r::n] for r in range(n)],
        [padded[r::n] for r in range(n)],
        [padded[r * total // n : (r + 1) * total // n] for r in range(n)],
    )
    if own not in ways:
        return None
    steps = [len(plan[0]) for plan in plans if plan]
    return NotYetError(
        f"{setting}, each rank cuts its shard of the epoch into batches of "
        f"{max(steps, default=0)}, expected every global batch to be split over the "
        "ranks",
        slug="cut-after-sharding",
        evidence=_steps(plans),
        rule="split the order into global batches first; then shard each of them",
    )


def _loops_end_together(
    plans: list[Batches], alone: Batches, setting: str
) -> NotYetError | None:
    steps = list(map(len, plans))
    if len(set(steps)) > 1:
        most, least = steps.index(max(steps)), steps.index(min(steps))
        return NotYetError(
            f"{setting}, rank {most} has {steps[most]} steps but rank {least} only "
            f"{steps[least]}, expected {len(alone)} on every rank",
            slug="uneven-shards",
            evidence=_steps(plans),
            rule="a rank without samples in a step gets an empty batch",
        )
    if steps[0] != len(alone):
        in_first = sum(len(plan[0]) for plan in plans if plan)
        return NotYetError(
            f"{setting}, each rank has {steps[0]} steps, expected {len(alone)}, as a "
            "single process has",
            slug="cut-after-sharding" if in_first == len(alone[0]) else "",
            evidence=_steps(plans),
            rule="len(loader) steps on every rank",
        )
    return None


def _unlike(
    parts: Plan, batch: list[int], setting: str, plans: list[Batches], alone: Batches
) -> NotYetError | None:
    together = sorted(number for part in parts for number in part)
    if together != sorted(batch):
        slug, difference = _difference(together, batch, plans, alone)
        return NotYetError(
            f"{setting}, {difference}",
            slug=slug,
            evidence=_step(parts),
            rule=f"a single process has {listed(batch)} in this step",
        )
    sizes = list(map(len, parts))
    if max(sizes) - min(sizes) > 1:
        return NotYetError(
            f"{setting}, the shards have {enumerated(sizes)} samples, expected shard "
            "sizes that differ by at most 1",
            slug="lopsided-parts",
            evidence=_step(parts),
            rule="the largest shard determines the time of the step",
        )
    return None


def _difference(
    together: list[int], batch: list[int], plans: list[Batches], alone: Batches
) -> tuple[str, str]:
    """The misconception, where it can be told, and what is wrong in this step."""
    extra = sorted(set(together) - set(batch))
    missing = sorted(set(batch) - set(together))
    if extra:
        everything = {number for plan in plans for part in plan for number in part}
        is_all = everything == set(range(sum(map(len, alone))))
        others = f"the ranks have {named(extra)} of another step, expected "
        instead = named(missing) if missing else "only this step's samples"
        return "cut-after-sharding" if is_all else "", others + instead
    twice = [number for number in together if together.count(number) > 1]
    if not missing:
        return (
            "batch-padded",
            f"the ranks have sample {twice[0]} {times(together.count(twice[0]))}, "
            "expected each sample once",
        )
    no_rank = f"no rank has {named(missing)}"
    expected = ", expected each sample of the global batch once"
    if twice:
        no_rank += f", but sample {twice[0]} occurs {times(together.count(twice[0]))}"
        return "", no_rank + expected
    return "remainder-lost" if len(missing) < len(plans) else "", no_rank + expected


def _steps(plans: list[Batches]) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(rank, f"{len(plan)} steps", _cut(plan))
        for rank, plan in enumerate(plans)
    )


def _step(parts: Plan) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(rank, f"{len(part)} of the batch", listed(part) or "–")
        for rank, part in enumerate(parts)
    )


def _cut(plan: Batches) -> str:
    return " | ".join(_few(plan))


def _few(plan: Batches) -> Iterator[str]:
    for batch in plan[:4]:
        yield " ".join(map(str, batch[:8])) + (" …" if len(batch) > 8 else "") or "–"
    if len(plan) > 4:
        yield "…"
