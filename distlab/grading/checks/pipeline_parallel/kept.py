"""What is still there of a microbatch when the next one goes backward."""

from __future__ import annotations

from distlab.grading.checks.pipeline_parallel.clock import Schedules
from distlab.grading.verdict import NotYetError

Left = list[tuple[int, list[int]]]
"""Of each backward, in order: its microbatch, and those kept that have had theirs."""


def expect_let_go(name: str, schedules: Schedules, left: list[Left]) -> None:
    """By the time a microbatch goes backward, those before it are gone.

    Judged where backwards come in the order of the forwards, one chunk per rank: there
    no name can be left over. A forward's has gone on to a later microbatch, and a
    backward's is that of the microbatch that goes backward now.

    Raises:
        NotYetError: one is still kept.
    """
    late = [rank for rank, own in enumerate(left) if any(kept for _, kept in own)]
    if not late or not all(map(_is_in_order, schedules)):
        return
    always = all(_is_one_late(left[rank]) for rank in late)
    if always:
        sentence = "each microbatch is still kept when the next one runs backward, "
        sentence += "expected it to be freed right after its own backward"
    else:
        number, kept = next((b, k) for b, k in left[late[0]] if k)
        sentence = f"rank {late[0]} still keeps microbatch {kept[-1]} during the "
        sentence += f"backward of microbatch {number}, expected it to be freed before"
    raise NotYetError(
        f"with {name}, {sentence}",
        slug="let-go-one-late" if always else "",
        evidence=[
            (rank, "kept" if rank in late else "right", _told(own))
            for rank, own in enumerate(left)
        ],
        rule="after its backward drop x, output and everything that holds them, "
        "before the next action",
    )


def _is_in_order(schedule: list[tuple[str, int, int]]) -> bool:
    forwards, backwards = ([e[1:] for e in schedule if e[0] == k] for k in "FB")
    return forwards == backwards and not any(chunk for _, _, chunk in schedule)


def _is_one_late(own: Left) -> bool:
    numbers = [number for number, _ in own]
    before = [[], *([number] for number in numbers[:-1])]
    return [kept for _, kept in own] == before


def _told(own: Left) -> str:
    found = [f"{kept[-1]} during B{number}" for number, kept in own if kept]
    if not found:
        return "nothing whose backward is done"
    return "; ".join(found[:4]) + ("; …" if len(found) > 4 else "")
