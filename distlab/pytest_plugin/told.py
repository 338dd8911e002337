"""How a test on ranks ended, and what pytest says about it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from distlab.terminal import ranks_in_words

MOST_OUTPUT = 1 << 16
"""Characters of a rank's output that are shown: its last ones."""


@dataclass(kw_only=True)
class Result:
    """How each rank's body ended, and what the ranks printed.

    `report` is the text on a hang, a mismatch or a timeout. `ends` has a rank's words,
    see `body.words_of`. `lost` are ranks whose process ended before their body did.
    `waiting` says where ranks were when we ended them.
    """

    world_size: int
    report: str = ""
    ends: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    waiting: dict[int, str] = field(default_factory=dict)
    output: dict[int, str] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        """Return True if a body raised, or a process ended too early."""
        return bool(self.lost) or any(
            words["outcome"] == "failed" for words in self.ends.values()
        )


def conclude(item: pytest.Function, result: Result) -> None:
    """Return if the test has passed; otherwise raise pytest's exception for it."""
    for rank, text in sorted(result.output.items()):
        if not text.strip():
            continue
        # JUnit's XML has the sections whose names begin like this.
        shown = text[-MOST_OUTPUT:]
        item.add_report_section("call", f"stdout of rank {rank}", shown)
        if item.config.option.capture == "no":
            for line in text.splitlines():
                sys.stdout.write(f"[rank {rank}] {line}\n")
    if result.report:
        pytest.fail(result.report, pytrace=False)
    if result.has_failed:
        pytest.fail(_failures(result), pytrace=False)
    for outcome, raised in (("xfailed", pytest.xfail), ("skipped", pytest.skip)):
        for rank, words in sorted(result.ends.items()):
            if words["outcome"] == outcome:
                raised(f"{words['reason']} (rank {rank})")


def _failures(result: Result) -> str:
    """One sentence, then each failure with its ranks and traceback."""
    failed = {
        rank: words
        for rank, words in sorted(result.ends.items())
        if words["outcome"] == "failed"
    }
    told = {**result.lost, **{rank: _in_short(words) for rank, words in failed.items()}}
    first = next(iter(told))
    alike = sorted(rank for rank in told if told[rank] == told[first])
    head = f"{ranks_in_words(alike)} of {result.world_size} failed: {told[first]}"
    if len(told) > len(alike):
        others = f"{len(told)} of {result.world_size} ranks failed"
        head = f"{others}, such as {ranks_in_words(alike)}: {told[first]}"
    parts = [head]
    parts += [f"rank {rank}: {why}" for rank, why in sorted(result.lost.items())]
    parts += [_group(ranks, failed) for ranks in _alike(failed)]
    waiting = [f"rank {rank} {where}" for rank, where in sorted(result.waiting.items())]
    return "\n\n".join([*parts, *filter(None, ["\n".join(waiting)])])


def _in_short(words: Mapping[str, Any]) -> str:
    return f"{words['type']}: {words['message']}" if words["message"] else words["type"]


def _alike(failed: Mapping[int, Mapping[str, Any]]) -> list[list[int]]:
    """Ranks that failed with the same exception in the same lines."""
    groups: dict[str, list[int]] = {}
    for rank, words in failed.items():
        groups.setdefault(repr((words["type"], words["frames"])), []).append(rank)
    return list(groups.values())


def _group(ranks: Sequence[int], failed: Mapping[int, Mapping[str, Any]]) -> str:
    title = f" {ranks_in_words(ranks)} "
    first = failed[ranks[0]]
    text = f"{title:-^80}\n{first['traceback'].rstrip()}"
    for rank in ranks[1:]:
        if failed[rank]["message"] != first["message"]:
            text += f"\nrank {rank}: {_in_short(failed[rank])}"
    return text
