"""The runs that a script was audited by, and questions that several detectors ask."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from distlab.audit.log import AuditLog, Event
from distlab.audit.places import Place
from distlab.audit.play import Played


@dataclass
class Trial:
    """The script as it is on n ranks, and the pair that is compared: n ranks and one.

    The pair ran in float64 if the script could, else as it is (`tolerance` says how far
    apart rounding may take them).
    """

    script: str
    many: Played
    pair: Played
    one: Played | None = None
    tolerance: float = 1e-8
    notes: list[str] = field(default_factory=list)

    @property
    def logs(self) -> list[AuditLog]:
        """The logs of the ranks of the script as it is."""
        return self.many.logs

    @property
    def world_size(self) -> int:
        """How many ranks there were."""
        return self.many.world_size

    def is_data_parallel(self) -> bool:
        """Return True if the ranks are meant to train copies of one model together.

        That is so if DDP holds the model in a group of all ranks, or the script reduces
        gradients over all of them, or a sampler deals the samples out to all.
        """
        return any(_is_parallel(log, self.world_size) for log in self.logs)

    def may_differ(self) -> bool:
        """Return True if copies are averaged now and then, or ranks may end early."""
        return any(_may_differ(log) for log in self.logs)

    def is_sharded(self) -> bool:
        """Return True if parameters are spread over ranks, as FSDP does."""
        return any(True for log in self.logs for _ in log.of("sharded")) or any(
            event["sharded"] for log in self.logs for event in log.of("step")
        )


def _may_differ(log: AuditLog) -> bool:
    averaged = (e["is_weight"] and "reduce" in e["op"] for e in log.of("collective"))
    return any(averaged) or any(True for _ in log.of("join"))


def _is_parallel(log: AuditLog, world_size: int) -> bool:
    return any(
        (event.kind == "ddp" and event["size"] == world_size)
        or (event.kind == "loader" and event["replicas"] == world_size)
        or (event.kind == "collective" and event["gradient"])
        for event in log.of("ddp", "loader", "collective")
    )


def training_loaders(log: AuditLog) -> set[int]:
    """Return the numbers of the loaders whose batches an optimizer step followed."""
    found, last = set(), None
    for event in log.of("batch", "step"):
        if event.kind == "batch":
            last = event["loader"]
        elif last is not None:
            found.add(last)
    return found


def loader_of(log: AuditLog, number: int) -> Event | None:
    """Return the event in which a loader was made."""
    return next((e for e in log.of("loader") if e["number"] == number), None)


@dataclass
class Epoch:
    """One pass over a loader on one rank; `indices` is None where there are none."""

    at: Place | None
    length: int | None
    part: list[int] | None = None
    """Of a Subset: the indices of its samples in the whole data set."""
    indices: list[int] | None = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    is_whole: bool = False
    draws: bool = False


def epochs(log: AuditLog, loader: int) -> list[Epoch]:
    """Return the passes over a loader, in order."""
    found: dict[int, Epoch] = {}
    fetched: list[Event] = []  # those of workers are at the end of the log
    for event in log.of("epoch", "batch", "epoch_end", "fetch"):
        number = event["epoch"]
        if event["loader"] != loader:
            continue
        if event.kind == "epoch":
            found[number] = Epoch(event.at, event["length"], event["part"])
        elif event.kind == "fetch":
            fetched.append(event)
        elif number in found:
            _go_on(found[number], event)
    for note in fetched:
        epoch = found.get(note["epoch"])
        if epoch is not None:
            epoch.content += note["content"] or []
            epoch.draws = epoch.draws or bool(note["drawn"])
    return [found[number] for number in sorted(found)]


def _go_on(epoch: Epoch, event: Event) -> None:
    """Add a batch, or the end, to a pass."""
    if event.kind == "epoch_end":
        epoch.is_whole = True
        return
    if event["indices"] is None:
        epoch.indices = None
    elif epoch.indices is not None:
        epoch.indices += event["indices"]


def steps(log: AuditLog) -> list[Event]:
    """Return the steps of the first optimizer."""
    all_steps = list(log.of("step"))
    return [e for e in all_steps if e["number"] == all_steps[0]["number"]]


def between_steps(log: AuditLog, *kinds: str) -> list[list[Event]]:
    """Return for each step of the first optimizer the events that led to it."""
    first = next((e["number"] for e in log.of("step")), None)
    found: list[list[Event]] = []
    gathered: list[Event] = []
    for event in log.of("step", *kinds):
        if event.kind != "step":
            gathered.append(event)
        elif event["number"] == first:
            found.append(gathered)
            gathered = []
    return found


def trains(forward: Event) -> bool:
    """Return True for a call of a model whose output may be trained on."""
    return bool(forward["training"] and forward["grad"])


def loss_line(backward: Event) -> Place | None:
    """Return the line that computed what a backward() starts from, else its own."""
    place: Place | None = backward["loss_at"] or backward.at
    return place


def by_backward(log: AuditLog) -> list[list[Event]]:
    """Return the backward() calls of each step that had some, of whichever optimizer.

    A script with two models steps their optimizers in turn, and each has its losses.
    """
    found: list[list[Event]] = [[]]
    for event in log.of("backward", "step"):
        if event.kind == "backward":
            found[-1].append(event)
        elif found[-1]:
            found.append([])
    return found[:-1]


def same(values: Iterable[object]) -> bool:
    """Return True if all values are equal."""
    values = list(values)
    return all(value == values[0] for value in values)


def few(names: list[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    told = ", ".join(names[:most])
    return told if len(names) <= most else f"{told} and {len(names) - most} more"


def some_ranks(ranks: list[int], world_size: int) -> str:
    """Return `rank 0`, `ranks 1 to 3`, `both ranks` or `all 4 ranks`."""
    if len(ranks) == world_size:
        return "both ranks" if world_size == 2 else f"all {world_size} ranks"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:6]))}" + ", …" * (len(ranks) > 6)
