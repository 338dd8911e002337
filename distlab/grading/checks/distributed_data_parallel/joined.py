"""Checks of task 3.23, `distributed_data_parallel.unused`: C3, join()."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.grading.checks.distributed_data_parallel.hooks import LAYERS_MIB
from distlab.grading.checks.distributed_data_parallel.steps import Tracked, copied
from distlab.grading.checks.distributed_data_parallel.watch import (
    FEWER,
    EventComm,
    doubling,
    gradients,
    loss_of,
    make_inputs,
    own_gradients,
)
from distlab.grading.clause import clause
from distlab.grading.kit.flat import flat, weights_of
from distlab.grading.kit.values import (
    Suspect,
    expect_values,
    same_everywhere,
)
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run

LEARNING_RATE = 0.5
BATCHES = (1, 3, 0, 2)
"""Of each rank: rank 2 has none at all, and where there are three rank 1 is last."""


def run_out(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """As many steps as this rank has batches, then join(); and one more by all.

    comm_hook doubles each sum, so an update takes half of it.
    """
    device = context.comm.device
    model = Tracked(seed).to(device)
    ddp = unit.DistributedDataParallel(
        model,
        EventComm(context.comm, []),
        bucket_size_mib=LAYERS_MIB,
        find_unused_parameters=True,
        comm_hook=doubling(unit, []),
    )
    parameters = [p for p in model.parameters() if p.requires_grad]

    def update() -> None:
        for parameter in parameters:
            if parameter.grad is not None:  # else it is told by `yielded`, or `after`
                parameter.data -= LEARNING_RATE / 2 * parameter.grad

    def step(number: int) -> None:
        model.zero_grad()
        loss_of(ddp(make_inputs(seed, number, context.rank).to(device))).backward()
        update()

    for number in range(BATCHES[context.rank % 4]):
        step(number)
    yielded = []
    for _ in ddp.join():
        found = gradients(model).values()
        yielded.append([None if g is None else g / 2 for g in found])
        update()
    joined = weights_of(model)
    buffers = [copied(buffer).reshape(-1) for buffer in model.buffers()]
    step(max(BATCHES))
    told = {"yielded": yielded, "joined": joined, "after": weights_of(model)}
    return {**told, "buffers": torch.cat([b.double() for b in buffers])}


class OneProcess:
    """What a single process computes that has, in each step, what is there.

    With `over_all` the division is by all ranks: a mistake.
    """

    def __init__(self, seed: int, n: int, over_all: bool) -> None:
        self.seed, self.by = seed, n if over_all else 0
        self.models = [Tracked(seed) for _ in range(n)]  # they differ in their buffers
        self.gradients: list[Tensor] = []  # of each step
        batches = [BATCHES[rank % 4] for rank in range(n)]
        for number in range(max(batches)):
            self.step(number, [r for r in range(n) if number < batches[r]])
        self.joined = weights_of(self.models[0])
        buffers = [copied(buffer).reshape(-1) for buffer in self.models[0].buffers()]
        self.buffers = torch.cat([buffer.double() for buffer in buffers])
        self.step(max(BATCHES), list(range(n)))
        self.after = weights_of(self.models[0])

    def step(self, number: int, ranks: list[int]) -> None:
        """A step of the ranks that have a batch."""
        parts = [
            own_gradients(self.models[r], make_inputs(self.seed, number, r))
            for r in ranks
        ]
        by = self.by or len(ranks)
        mean = {k: torch.stack([p[k] for p in parts]).sum(0) / by for k in parts[0]}
        first = self.models[ranks[0]]
        for name, parameter in first.named_parameters():
            if parameter.requires_grad:
                parameter.data -= LEARNING_RATE * mean[name]
        for model in self.models:
            model.load_state_dict(first.state_dict())
        self.gradients.append(flat(mean))


@lru_cache(maxsize=32)
def one_process(seed: int, n: int, over_all: bool = False) -> OneProcess:
    """See OneProcess."""
    return OneProcess(seed, n, over_all)


@clause(
    "distributed_data_parallel.unused",
    "C3",
    worlds=FEWER,
    runs=[on_ranks(run_out).when("when the ranks have different numbers of batches")],
    after=("C1",),
)
def who_is_out_takes_part(runs: Runs) -> str | None:
    """The weights of one process that has, in each step, what is there."""
    return _joined(runs.finished(run_out), runs.seed)


def _joined(run: Run, seed: int) -> str:
    n = run.world_size
    batches = [BATCHES[rank % 4] for rank in range(n)]
    _expect_yields(run, batches)
    right, wrong = one_process(seed, n), one_process(seed, n, over_all=True)
    _expect_steps(run, batches, right, wrong)
    for part, what in (
        ("joined", "after join(), the weights"),
        ("buffers", "after join(), the buffers"),
        ("after", "one step of all ranks after join(), the weights"),
    ):
        expect_values(
            [value[part] for value in run.values],
            same_everywhere(getattr(right, part), n),
            what=what,
            verb="are",
            suspects=[_over_all(what, same_everywhere(getattr(wrong, part), n))],
        )
    counts = ", ".join(map(str, batches))
    return f"n = {n}: {counts} batches, one training"


def _old_sent(
    what: str,
    means: list[Tensor],
    out: list[int],
    n: int,
    on_those: Callable[[Tensor], list[Tensor]],
) -> list[Suspect]:
    """Whoever is out sends what .grad has from the step before: twice a mean."""
    if len(means) < 2:
        return []
    before, mean = means[-2:]
    return [
        Suspect(
            slug="",
            values=on_those(mean + 2 * before * len(out) / (n - len(out))),
            sentence=f"{what} are wrong: a rank without a batch sent its old .grad, "
            "expected zeros",
            rule="a rank without a batch sends zeros, whatever its .grad holds",
        )
    ]


def _over_all(what: str, values: list[Tensor]) -> Suspect:
    return Suspect(
        slug="mean-over-absent",
        values=values,
        sentence=f"{what} are means over all {len(values)} ranks, expected means over "
        "those that had a batch",
        rule="finalize_backward() divides by len(self.active)",
    )


def _expect_yields(run: Run, batches: list[int]) -> None:
    missed = [max(batches) - own for own in batches]
    told = [len(value["yielded"]) for value in run.values]
    if told != missed:
        rank = next(r for r, count in enumerate(told) if count != missed[r])
        own, most = batches[rank], max(batches)
        raise NotYetError(
            f"on rank {rank}, with {own} batch{'es' * (own != 1)} where others have "
            f"{most}, join() yields {told[rank]} times, expected {missed[rank]}",
            evidence=[
                (
                    rank,
                    "right" if told[rank] == missed[rank] else "wrong",
                    f"{own} batches; join() yielded {told[rank]} times, "
                    f"expected {missed[rank]}",
                )
                for rank, own in enumerate(batches)
            ],
            rule="yield after each step in which some rank has a batch",
        )


def _expect_steps(
    run: Run, batches: list[int], right: OneProcess, wrong: OneProcess
) -> None:
    """Whenever join() yields, .grad is the mean of the ranks that have a batch."""
    n = run.world_size
    for number in range(max(batches)):
        out = [rank for rank in range(n) if batches[rank] <= number]
        what = f"when join() yields for step {number + 1}, the gradients"
        found = [run.values[rank]["yielded"][number - batches[rank]] for rank in out]
        if any(part is None for parts in found for part in parts):
            raise NotYetError(
                f"when join() yields for step {number + 1}, a .grad is None, expected "
                "the mean of the ranks that have a batch"
            )
        actual = [torch.cat([part.reshape(-1) for part in parts]) for parts in found]
        mean, over_all = right.gradients[number], wrong.gradients[number]

        def on_those(
            guess: Tensor, mean: Tensor = mean, out: Any = out
        ) -> list[Tensor]:
            return [guess if rank in out else mean for rank in range(n)]

        zeros = "zeros, expected the mean of the ranks that have a batch"
        expect_values(
            [actual[out.index(r)] if r in out else mean for r in range(n)],
            same_everywhere(mean, n),
            what=what,
            verb="are",
            suspects=[
                _over_all(what, on_those(over_all)),
                Suspect(
                    slug="",
                    values=on_those(torch.zeros_like(mean)),
                    sentence=f"{what} are {zeros}",
                ),
                *_old_sent(what, right.gradients[: number + 1], out, n, on_those),
            ],
        )
