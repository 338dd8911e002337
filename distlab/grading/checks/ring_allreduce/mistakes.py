"""What a ring left on the ranks, and what went wrong on the way round."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distlab.grading.checks.ring_allreduce.counts import counted, in_words, what_is_off
from distlab.grading.checks.ring_allreduce.steps import SENDING
from distlab.grading.kit.apart import apart
from distlab.grading.kit.messages import calls_of_each, expect_messages, received
from distlab.grading.kit.values import (
    Suspect,
    close,
    expect_equal_bits,
    expect_values,
    same_everywhere,
)
from distlab.grading.verdict import NotYetError
from distlab.runner import Run
from distlab.runner.autopsy import Evidence

FRESH = "send the chunk that you received in the step before, with yours added"
ADD = "add the received chunk to your own chunk of the same number"
NEEDED = "a sum over the ranks needs messages"  # whether or not there is one
TAKEN_AWAY = ": a rank's values were subtracted"
IN_PLACE = "write into the caller's tensor; .contiguous() may return a copy"


class Sums:
    """What each rank had and has, and the sum of what they had."""

    def __init__(self, run: Run) -> None:
        self.run, self.n = run, run.world_size
        self.before: list[Tensor] = [value["before"] for value in run.values]
        self.after: list[Tensor] = [value["after"] for value in run.values]
        self.returned: list[Any] = [value["returned"] for value in run.values]
        self.total = torch.stack(self.before).sum(0)
        self.cuts: list[Any] = [value.get("bounds") for value in run.values]
        self.owners: list[Any] = [value.get("owner") for value in run.values]

    def right(self, value: object) -> bool:
        """Whether it is the sum, up to rounding."""
        return close(value, self.total, 1e-12)

    def chunk(self, tensor: Tensor, number: int) -> Tensor:
        """As the unit's own chunk_bounds cuts it."""
        start, end = self.cuts[0][number]
        return tensor[start:end]

    def is_done(self, rank: int, number: int) -> bool:
        """Whether this chunk of a rank holds the sum."""
        done = self.chunk(self.total, number)
        return close(self.chunk(self.after[rank], number), done, 1e-12)

    def counts(self, tensor: Tensor) -> list[list[int]]:
        """Of values in digits: how often each rank is in each element."""
        return counted(tensor, self.n)

    def is_less(self) -> bool:
        """Of values in digits: whether something was taken away."""
        found = [counts for tensor in self.after for counts in self.counts(tensor)]
        return any(times < 0 for counts in found for times in counts)


# ── 3.2: one chunk each ─────────────────────────────────────────────────────────────


def expect_owners(sums: Sums, counts: Sums | None) -> None:
    """Each rank returned a chunk of its own, and that chunk is the sum.

    `counts` is the same in digits, if it came to an end.

    Raises:
        NotYetError: something of it is not so.
    """
    _expect_bounds(sums)
    if sums.total.numel():
        expect_messages(sums.run, NEEDED)
    _expect_numbers(sums)
    wrong = [r for r, own in enumerate(sums.owners) if not sums.is_done(r, own)]
    if wrong:
        raise _wrong_chunk(sums, wrong, counts)
    twice = [own for own in sums.owners if sums.owners.count(own) > 1]
    if twice:
        ranks = [r for r, own in enumerate(sums.owners) if own == twice[0]]
        raise NotYetError(
            f"ranks {ranks[0]} and {ranks[1]} both returned chunk index {twice[0]}, "
            "expected a different one on each rank",
            slug="wrong-owner",
            evidence=_owned(sums),
            rule="all ranks must return different numbers",
        )


def _expect_bounds(sums: Sums) -> None:
    bounds = sums.cuts[0]
    if isinstance(bounds, str):
        raise NotYetError(f"chunk_bounds (3.1) {bounds}", fatal=True)
    if len(bounds) != sums.n:
        raise NotYetError(
            f"chunk_bounds returned {len(bounds)} chunks for {sums.n} ranks, expected "
            "one per rank: see 3.1",
            fatal=True,
        )


def _expect_numbers(sums: Sums) -> None:
    for rank, own in enumerate(sums.owners):
        if own == "None":
            raise NotYetError(
                f"rank {rank} returned None, expected the number of its finished chunk",
                slug="returned-none",
                rule="return the number of the chunk that is the sum",
            )
        if not isinstance(own, int) or isinstance(own, bool):
            got = "a tensor" if str(own).startswith("tensor(") else own
            raise NotYetError(
                f"rank {rank} returned {got}, expected the number of its finished chunk"
            )
        if not 0 <= own < sums.n:
            raise NotYetError(
                f"rank {rank} returned {own}, expected a chunk number from 0 to "
                f"{sums.n - 1}",
                slug="wrong-owner",
                rule="count modulo n",
            )


def _owned(sums: Sums) -> tuple[Evidence, ...]:
    lines = []
    for rank, own in enumerate(sums.owners):
        done = [c for c in range(sums.n) if sums.is_done(rank, c)]
        has = ", ".join(map(str, done)) or "none"
        lines.append(Evidence(rank, "returns", f"{own}; the sum is in chunk {has}"))
    return tuple(lines)


def _wrong_chunk(sums: Sums, wrong: list[int], counts: Sums | None) -> NotYetError:
    rank, own = wrong[0], sums.owners[wrong[0]]
    done = [
        [c for c in range(sums.n) if len(sums.chunk(sums.total, c))] for _ in sums.after
    ]
    done = [[c for c in own if sums.is_done(r, c)] for r, own in enumerate(done)]
    if all(done):
        return NotYetError(
            f"rank {rank} returned chunk {own}, expected {done[rank][0]}, the chunk in "
            "which it has the sum",
            slug="wrong-owner",
            evidence=_owned(sums),
            rule="which chunk arrived last, and what was added to it?",
        )
    same_chunk = _same_chunk(sums, counts)
    if same_chunk:
        return same_chunk
    evidence = _chunk_counts(counts) if counts else _owned(sums)
    untouched = all(map(torch.equal, sums.after, sums.before))
    if untouched and all(map(received, sums.run.ranks)):
        return NotYetError(
            "every rank's tensor is unchanged: received values went elsewhere",
            slug="not-in-place",
            evidence=evidence,
            rule="chunk += received; tensor[start:end] is a view, chunk = chunk + … "
            "is a new tensor",
        )
    if counts and _overwritten(counts):
        return NotYetError(
            f"chunk {own} of rank {rank} holds one rank's values only: the received "
            "chunk replaced the others, expected their sum",
            slug="last-write-wins",
            evidence=evidence,
            rule="receive into a tensor of your own, then add it",
        )
    less = counts is not None and counts.is_less()
    return NotYetError(
        f"rank {rank} returned chunk {own}, but {_how_wrong(sums, rank, own, counts)}",
        evidence=evidence,
        rule=ADD if less else FRESH,
    )


def _how_wrong(sums: Sums, rank: int, own: int, counts: Sums | None) -> str:
    """Whose values a chunk lacks or has twice; or else its first wrong element."""
    ranks = counts.counts(counts.chunk(counts.after[rank], own)) if counts else []
    if what := next(filter(None, map(what_is_off, ranks)), ""):
        return f"that chunk {what}"
    got = sums.chunk(sums.after[rank], own)
    expected = sums.chunk(sums.total, own)
    pairs = list(zip(got, expected, strict=True))
    number = next(i for i, pair in enumerate(pairs) if not close(*pair, 1e-12))
    has, needs = apart(*map(float, pairs[number]))
    return f"element {number} of that chunk is {has}, expected the sum, {needs}"


def _overwritten(counts: Sums) -> bool:
    """Every rank's chunk has in it one rank alone, and somewhere not itself."""
    if counts.n < 3 or not all(isinstance(own, int) for own in counts.owners):
        return False
    found = [
        counts.counts(counts.chunk(counts.after[rank], own))
        for rank, own in enumerate(counts.owners)
    ]
    alone = all(len(c) == 1 and sorted(c[0])[-2:] == [0, 1] for c in found)
    return alone and any(c[0].index(1) != rank for rank, c in enumerate(found))


def _same_chunk(sums: Sums, counts: Sums | None) -> NotYetError | None:
    """The same place is sent in each step, and somebody is added twice."""
    if counts is None or sums.n < 3:
        return None
    sent = [
        {(call["ptr"], call["bytes"]) for call in record.calls()[: sums.n - 1]}
        for record in counts.run.ranks
        if all(call["op"] in SENDING for call in record.calls())
    ]
    twice = any(
        times > 1
        for tensor in counts.after
        for ranks in counts.counts(tensor)
        for times in ranks
    )
    if len(sent) != sums.n or not twice or any(len(places) > 1 for places in sent):
        return None
    return NotYetError(
        "every rank sends the same chunk in every step, so its neighbor adds it "
        f"{sums.n - 1} times: expected the chunk just received",
        slug="same-chunk-every-step",
        evidence=_chunk_counts(counts),
        rule=FRESH,
    )


def _chunk_counts(counts: Sums) -> tuple[Evidence, ...]:
    """Who is in each chunk of each rank."""
    lines = []
    for rank, tensor in enumerate(counts.after):
        chunks = []
        for number in range(counts.n if counts.cuts[0] else 0):
            ranks = counts.counts(counts.chunk(tensor, number))
            who = "/".join(map(in_words, ranks))
            chunks.append(f"chunk {number}: {who}")
        if not chunks:
            found = ", ".join(map(in_words, counts.counts(tensor)[:4]))
            chunks = ["has the ranks", found]
        lines.append(Evidence(rank, "added", "  ".join(chunks[:4])))
    return tuple(lines)


# ── 3.3 and 3.4: everything everywhere ──────────────────────────────────────────────


def expect_sums(sums: Sums, name: str, counts: Sums | None, aside: str = "") -> None:
    """Every rank's own tensor holds the sum, the same bits.

    Raises:
        NotYetError: it does not.
    """
    if sums.total.numel():
        expect_messages(sums.run, NEEDED)
    what = f"the tensor{aside}"
    if not all(map(sums.right, sums.after)):
        _expect_in_place(sums, name, aside)
        _expect_second_half(sums, name)
    try:
        expect_values(
            sums.after,
            same_everywhere(sums.total, sums.n),
            what=f"after {name}, {what}",
            tolerance=1e-12,
            suspects=_wrong_sums(sums, name),
            parts=sums.before,
        )
    except NotYetError as failure:
        if failure.slug or not counts or all(map(counts.right, counts.after)):
            raise
        shown = failure.but(evidence=_chunk_counts(counts))
        if counts.is_less():
            shown = shown.but(message=failure.message + TAKEN_AWAY, rule=ADD)
        raise shown from failure
    expect_equal_bits(
        sums.after,
        what="the sum",
        slug="own-order-sum",
        rule="finish each chunk on one rank, then copy it: a + b + c and c + b + a "
        "round differently",
    )


def _expect_in_place(sums: Sums, name: str, aside: str) -> None:
    """The sum must not be elsewhere."""
    wrong = [rank for rank, now in enumerate(sums.after) if not sums.right(now)]
    as_it_was = [torch.equal(sums.after[rank], sums.before[rank]) for rank in wrong]
    if not all(as_it_was):
        return
    returned = all(sums.right(sums.returned[rank]) for rank in wrong)
    if not returned and not all(received(sums.run.ranks[rank]) for rank in wrong):
        return
    told = "returned the sum, but left" if returned else "left"
    raise NotYetError(
        f"{name} {told} the caller's tensor{aside} unchanged, expected the sum in it",
        slug="not-in-place",
        evidence=calls_of_each(sums.run),
        rule=IN_PLACE,
    )


def _expect_second_half(sums: Sums, name: str) -> None:
    """A rank that has some elements of the sum, and was not sent the others."""
    if sums.total.dim() != 1 or len(sums.total) < sums.n or sums.n < 2:
        return
    length = len(sums.total)
    least = 2 * (length - -(-length // sums.n)) * sums.total.element_size()
    done = torch.stack(
        [torch.isclose(now, sums.total, rtol=1e-12, atol=0.0) for now in sums.after]
    )
    few = all(record.sent_bytes < least for record in sums.run.ranks)
    shares = done.sum(1).tolist()
    if few and bool(done.any(0).all()) and all(0 < s < length for s in shares):
        lines = [
            Evidence(rank, "has", f"{share} of {length} sums")
            for rank, share in enumerate(shares)
        ]
        raise NotYetError(
            f"after {name}, rank 0 holds the sum in only {shares[0]} of {length} "
            "elements, expected the full sum on every rank",
            slug="second-half-missing",
            evidence=tuple(lines),
            rule="send each finished chunk on from rank to rank until all have it: "
            "n - 1 steps",
        )


def _wrong_sums(sums: Sums, name: str) -> list[Suspect]:
    n, first = sums.n, sums.before[0]
    after = f"after {name}" + " without average=True" * (name == "all_reduce")
    return [
        Suspect(
            slug="",
            values=sums.before,
            sentence=f"after {name}, every rank's tensor is unchanged, expected the "
            "sum",
            rule=IN_PLACE,
        ),
        Suspect(
            slug="mean-not-sum",
            values=same_everywhere(sums.total / n, n),
            sentence=f"{after}, every rank has the mean, expected the sum",
            rule="divide with average=True only",
        ),
        Suspect(
            slug="",
            values=same_everywhere(first, n),
            sentence=f"after {name}, every rank has rank 0's tensor, expected the sum "
            "over the ranks",
            rule=ADD,
        ),
    ]


def mean_mistakes(sums: Sums) -> list[Suspect]:
    """What is left instead of the mean."""
    n = sums.n
    return [
        Suspect(
            slug="sum-not-mean",
            values=same_everywhere(sums.total, n),
            sentence="with average=True, every rank has the sum, expected the mean",
        ),
        Suspect(
            slug="hard-coded-two",
            values=same_everywhere(sums.total / 2, n),
            sentence=f"with average=True on {n} ranks, the sum is divided by 2, "
            f"expected by {n}",
        ),
        Suspect(
            slug="divided-twice",
            values=same_everywhere(sums.total / n**2, n),
            sentence=f"with average=True, the sum is divided by {n} twice, expected "
            "once",
        ),
    ]
