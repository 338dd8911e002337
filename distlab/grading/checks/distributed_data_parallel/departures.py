"""When the buckets of a backward() leave, and when they are due.

It is read from one list per rank: the gradients that become ready, and the calls.
"""

from __future__ import annotations

from distlab.comm import COLLECTIVES
from distlab.grading.checks.distributed_data_parallel.watch import Happened
from distlab.runner import Run
from distlab.runner.autopsy import Evidence


def departures(events: list[Happened]) -> list[int]:
    """Where in the list the collectives with more than a few numbers begin."""
    return [
        place
        for place, event in enumerate(events)
        if event[0] == "call" and event[1] in COLLECTIVES and event[2] > 1
    ]


def due_places(events: list[Happened], buckets: list[list[str]]) -> list[int]:
    """Where each bucket, and all before it, has its last gradient."""
    ready = {e[1]: place for place, e in enumerate(events) if e[0] == "gradient"}
    last = [max(ready.get(name, -1) for name in bucket) for bucket in buckets]
    return [max(last[: place + 1]) for place in range(len(last))]


def lane(events: list[Happened]) -> str:
    """The list in a line: a dot for each gradient, and the calls between."""
    words = {"gradient": "·", "wait": "wait"}
    text = " ".join(
        words.get(event[0], event[1] if event[-1] is False else f"{event[1]} (waits)")
        for event in events
    )
    return text if len(text) < 72 else f"{text[:70]} …"


def lanes(run: Run, part: str) -> tuple[Evidence, ...]:
    """That of each of the first ranks."""
    return tuple(
        Evidence(record.rank, "order", lane(record.value[part]["events"]))
        for record in run.ranks[:4]
    )


def untimely(events: list[Happened], buckets: list[list[str]]) -> tuple[str, str]:
    """What is wrong with the departures, and its name if it has one; or nothing."""
    left, due = departures(events), due_places(events, buckets)
    arrivals = [place for place, event in enumerate(events) if event[0] == "gradient"]
    if not left:
        return "no bucket is sent", "no-messages"
    if len(left) != len(buckets):
        return (
            f"backward() starts {len(left)} collectives for {len(buckets)} buckets",
            "",
        )
    if left[0] > arrivals[-1] and len(buckets) > 1:
        return (
            "the first all_reduce starts only after the last gradient is ready",
            "reduced-after-backward",
        )
    for number, (departure, wanted) in enumerate(zip(left, due, strict=True)):
        if departure < wanted:
            missing = sum(departure < place <= wanted for place in arrivals)
            return (
                f"bucket {number} is sent before {missing} more gradient"
                f"{'s' * (missing > 1)} that it needs",
                "bucket-leaves-too-early",
            )
        late = sum(wanted < place < departure for place in arrivals)
        if late:
            return (
                f"bucket {number} is sent {late} gradient{'s' * (late > 1)} after it "
                "was complete",
                "bucket-leaves-too-late",
            )
    return "", ""
