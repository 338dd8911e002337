"""Run the lab of phase 4 on an elastic epoch, on 4, then 2, then 3 processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from distlab.walkthroughs import phase4_elastic_rank as rank
from distlab.walkthroughs.base import Ranks

UNIT = "elastic"
EVENTS = (
    *("0 join a", "0 join b", "0 join c", "0 join d"),
    # a and b end in the last step of their part; d has completed it, c has not.
    *("8 end a", "8 end b", "8.1 join c {before} 1", "8.2 join d {first} 1"),
    *("16 join e", "16.1 join c {both} 2", "16.2 join d {both} 2"),
)
"""Settings of a Membership. We fill in the steps of each part."""


@dataclass
class Resized:
    """An epoch of several generations, beside one on a fixed number of ranks."""

    generations: list[dict[str, Any]]  # what the Membership has formed
    samples: list[list[list[int]]] = field(default_factory=list)  # by step and rank
    losses: list[float] = field(default_factory=list)
    fixed_losses: list[float] = field(default_factory=list)
    num_samples: int = 0  # of the epoch

    def rows(self) -> Mapping[str, Mapping[str, float | str]]:
        """Return a row for each generation."""
        return {
            f"{number + 1}": {
                "ranks": len(one["members"]),
                "source": one["source"],
                "steps of accumulation": one["accum"],
                "steps": one["steps"],
            }
            for number, one in enumerate(self.generations)
        }

    def summary(self) -> list[str]:
        """Say whether each sample is read once and the losses are equal."""
        counts = Counter(chain.from_iterable(chain.from_iterable(self.samples)))
        sizes = [sum(map(len, shards)) for shards in self.samples]
        pairs = zip(self.losses, self.fixed_losses, strict=True)
        difference = max(abs(own - fixed) for own, fixed in pairs)
        once = sum(times == 1 for times in counts.values())
        return [
            f"samples of the epoch {self.num_samples}, read once {once}, "
            f"read more often {len(counts) - once}",
            f"samples of a step {sorted({*sizes[:-1]})}, of the last one {sizes[-1]}",
            f"losses as on a fixed number of ranks, within 1e-9: {difference < 1e-9}",
        ]


class Elastic(Ranks):
    """Experiments with `elastic`."""

    def resized(
        self, *, steps: tuple[int, int], global_batch_size: int, microbatch_size: int
    ) -> Resized:
        """Run one epoch: steps[0] steps on 4 ranks, steps[1] on 2, the rest on 3.

        The learner's Membership forms the generations, and its resplit decides which
        rank reads which samples. Only member d completes the last step on 4 ranks.
        """
        first, second = steps
        both = first + second
        words = {"before": first - 1, "first": first, "both": both}
        sizes = {
            "global_batch_size": global_batch_size,
            "microbatch_size": microbatch_size,
        }
        events = tuple(event.format(**words) for event in EVENTS)
        formed = self.run(UNIT, 1, rank.decide, events=events, **sizes).values[0]
        resized, states = Resized(formed), dict[str, str]()
        history: tuple[tuple[int, ...], ...] = ()
        for number, one in enumerate(formed):
            members = one["members"]
            values = {
                "history": history,
                "num_steps": (first, second, 10**6)[number],
                "accum": one["accum"],
                "state": states.get(one["source"], ""),
                "ahead": members.index("d") if number == 0 else -1,
            }
            parts = self.run(
                UNIT, len(members), rank.train_part, **values, **sizes
            ).values
            resized.losses += parts[0]["losses"]
            shards = zip(*(part["samples"] for part in parts), strict=True)
            resized.samples += map(list, shards)
            states = {
                name: part["state"] for name, part in zip(members, parts, strict=True)
            }
            one["steps"] = max(part["completed"] for part in parts)
            # All take the state of the member that is ahead: its step is completed.
            history = (*history, (one["steps"],) * len(members))
        fixed = self.run(
            UNIT, 4, rank.train_part, history=(), num_steps=10**6,
            accum=formed[0]["accum"], state="", **sizes,
        ).values  # fmt: skip
        resized.fixed_losses = fixed[0]["losses"]
        resized.num_samples = len({
            index for part in fixed for batch in part["samples"] for index in batch
        })  # fmt: skip
        return resized
