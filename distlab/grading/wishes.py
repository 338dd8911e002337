"""What checks would run: each is asked on a bench that only listens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from distlab.grading.clause import Check
from distlab.grading.harness import Implementation, RankHarness, Scenario
from distlab.grading.together import Play, play_of
from distlab.runner import Run


class Asked(BaseException):  # no check may catch it
    """What a check would run."""

    def __init__(self, play: Play) -> None:
        self.play = play


@dataclass
class Asker(RankHarness):
    """Answers a check's wish for a run by telling it to who asks."""

    def observe(self, impl: Implementation, scenario: Scenario, **values: Any) -> Run:
        """Never returns."""
        raise Asked(play_of(scenario, values))


def first_plays(
    checks: Iterable[Check], impl: Implementation, asker: Asker
) -> tuple[Play, ...]:
    """What each of these checks runs first, and then; each play once."""
    plays: dict[Play, None] = {}
    for check in checks:
        try:
            check.judge(impl, asker)
        except Asked as asked:
            plays[asked.play] = None
            more = check.also(asker.world_size)
            plays.update((play_of(*wish), None) for wish in more)
        except Exception:  # what it has to say is heard when it judges
            continue
    return tuple(plays)
