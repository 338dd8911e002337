"""What all_gather and reduce_scatter left on the ranks, and what the mistake was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distlab.grading.kit.messages import expect_messages, received
from distlab.grading.kit.values import close, expect_values
from distlab.grading.verdict import NotYetError
from distlab.runner import Run
from distlab.runner.autopsy import Evidence
from distlab.terminal import ranks_in_words

BEFORE = -7.0
"""What is in every output before the call: it may hold anything."""
PLACE = "chunk number r belongs to rank r, on every rank: output.chunk(n)[r]"
FOR_THE_OTHER = (
    "chunk r of every input is for rank r: what is sent to rank dst is "
    "input.chunk(n)[dst]"
)
IN_PLACE = "write into output: its chunks are views; output = … only rebinds the name"
FILL = "every rank's output is filled, not only one rank's"


class Guess(NamedTuple):
    """What a mistake is called, the sentence about it, and the rule that it breaks."""

    slug: str
    sentence: str
    rule: str = PLACE


class Outputs:
    """What one call left on the ranks, in chunks of `size` numbers."""

    def __init__(self, run: Run) -> None:
        self.run, self.n = run, run.world_size
        self.inputs: list[Tensor] = [value["before"] for value in run.values]
        self.outputs: list[Tensor] = [value["output"] for value in run.values]
        self.returned: list[Any] = [value["returned"] for value in run.values]
        self.size = min(len(self.inputs[0]), len(self.outputs[0]))
        single = self.inputs[0].dtype == torch.float32
        self.tolerance = 1e-6 if single else 1e-12

    def same(self, value: object, other: Tensor) -> bool:
        """Whether two tensors are the same up to rounding."""
        return close(value, other, self.tolerance)

    def are(self, expected: Sequence[Tensor]) -> bool:
        """Whether every rank's output is the expected one."""
        pairs = zip(self.outputs, expected, strict=True)
        return all(self.same(output, right) for output, right in pairs)

    def untouched(self) -> list[int]:
        """The ranks whose output is as it was."""
        return [r for r, out in enumerate(self.outputs) if bool((out == BEFORE).all())]

    def evidence(self, expected: Sequence[Tensor]) -> tuple[Evidence, ...]:
        """A line per rank, of each chunk its first number, which says whose it is."""
        lines = []
        for rank, output in enumerate(self.outputs):
            state = "right" if self.same(output, expected[rank]) else "wrong"
            had, got, right = map(
                self._firsts, (self.inputs[rank], output, expected[rank])
            )
            text = f"had {had}   got {got}   expected {right}"
            lines.append(Evidence(rank, state, text))
        return tuple(lines)

    def _firsts(self, tensor: Tensor) -> str:
        firsts = [f"{number:.4g}" for number in tensor[:: self.size].tolist()]
        return " ".join(firsts[:4]) + (" …" if len(firsts) > 4 else "")


Guesser = Callable[[Outputs, Sequence[Tensor]], Guess | None]


def judge(
    seen: Outputs, expected: Sequence[Tensor], name: str, guesser: Guesser
) -> None:
    """Each rank's output must be the expected one.

    Raises:
        NotYetError: it is not; with what `guesser` makes of it, if it knows it.
    """
    if seen.are(expected):
        expect_messages(seen.run, f"{name}'s output is right, but not through comm")
        return
    expect_messages(seen.run, f"{name}'s output is wrong")
    guess = _outside(seen, expected, name) or guesser(seen, expected)
    if guess:
        lines = seen.evidence(expected)
        raise NotYetError(
            guess.sentence, slug=guess.slug, evidence=lines, rule=guess.rule
        )
    try:
        expect_values(
            seen.outputs,
            expected,
            what=f"{name}'s output",
            tolerance=seen.tolerance,
        )
    except NotYetError as failure:
        raise failure.but(evidence=seen.evidence(expected)) from failure


def _outside(seen: Outputs, expected: Sequence[Tensor], name: str) -> Guess | None:
    """An output is as it was, although its rank took part."""
    ranks = seen.untouched()
    if not ranks:
        return None
    on = "every rank" if len(ranks) == seen.n > 1 else f"rank {ranks[0]}"
    unchanged = f"{name}'s output is unchanged on {on}"
    if all(seen.same(seen.returned[rank], expected[rank]) for rank in ranks):
        sentence = f"{name} returned the right tensor, but `output` is unchanged on "
        sentence += f"{on}, expected the values there"
        return Guess("not-in-place", sentence, IN_PLACE)
    if seen.n == 1:
        sentence = f"with one rank, {name} left `output` unchanged, expected `input`"
        return Guess("", sentence, "n = 1: output = input")
    if len(ranks) == seen.n and all(map(received, seen.run.ranks)):
        return Guess(
            "not-in-place",
            f"{unchanged}: the received values went into another tensor",
            IN_PLACE,
        )
    return Guess("", f"{unchanged}, expected it filled on every rank", FILL)


# ── all_gather ──────────────────────────────────────────────────────────────────────


def wrong_gather(seen: Outputs, expected: Sequence[Tensor]) -> Guess | None:
    """What is wrong with the outputs of an all_gather, if it has a name."""
    n, ranks = seen.n, range(seen.n)
    holds = [_whose(seen, output) for output in seen.outputs]
    if all(holds[r] == [None if k == r else k for k in ranks] for r in ranks):
        return Guess(
            "own-chunk-missing",
            "each rank's output has the others' inputs, but its own chunk is "
            "unchanged, expected its own input there",
            "a rank's own input is one of the n inputs: copy it into chunk number rank",
        )
    if all(held == [r] * n for r, held in enumerate(holds)):
        sentence = "every chunk of a rank's output is that rank's own input, "
        return Guess("", sentence + "expected chunk r to be rank r's")
    odd = [r for r in ranks if holds[r] != [*ranks]]
    if all(set(held) == {*ranks} for held in holds):
        order = ", ".join(map(str, holds[odd[0]]))
        return Guess(
            "wrong-chunk-order",
            f"rank {odd[0]}'s output has the inputs of ranks {order} in this order, "
            "expected the order of the ranks",
        )
    alone = all(set(holds[rank]) <= {None, rank} for rank in odd)
    if len(odd) == n - 1 and 0 not in odd and alone:
        sentence = "only rank 0's output has all inputs, expected them on every rank"
        return Guess("", sentence, FILL)
    return _old_in_it(seen, expected) or _odd_chunk(seen, holds, odd[0])


def _old_in_it(seen: Outputs, expected: Sequence[Tensor]) -> Guess | None:
    for times in (1, seen.n - 1, seen.n):
        if seen.are([right + times * BEFORE for right in expected]):
            often = f"{times} × " * (times > 1)
            sentence = (
                f"every rank's output is the right value plus {often}its old value, "
                f"{BEFORE:g}, expected the old value replaced"
            )
            rule = "output may hold any values: set it to zero before you add to it"
            return Guess("output-not-empty", sentence, rule)
    return None


def _odd_chunk(
    seen: Outputs, holds: Sequence[Sequence[int | None]], odd: int
) -> Guess | None:
    """The first chunk that is not as it should be, on rank `odd`."""
    if len({*map(tuple, holds)}) == 1 and len({*holds[0]}) == 1 and holds[0][0] == 0:
        now = [value["input"] for value in seen.run.values]
        is_lost = not all(map(seen.same, now, seen.inputs))
        and_so = ", and some inputs were overwritten" if is_lost else ""
        sentence = "on every rank, every chunk of `output` is rank 0's input, expected "
        return Guess("", f"{sentence}chunk r to be rank r's{and_so}")
    chunk = next(k for k, held in enumerate(holds[odd]) if held != k)
    held = holds[odd][chunk]
    if held is None:
        sentence = (
            f"with {seen.n} ranks, chunk {chunk} of rank {odd}'s output is unchanged, "
            f"expected rank {chunk}'s input"
        )
        return Guess("", sentence, "n - 1 inputs have to reach every rank")
    if held >= 0:
        sentence = f"chunk {chunk} of rank {odd}'s output holds rank {held}'s input, "
        return Guess("", f"{sentence}expected rank {chunk}'s")
    return None


def _whose(seen: Outputs, output: Tensor) -> list[int | None]:
    """For each chunk, whose input it is; -1 for anything else, None if untouched."""
    found: list[int | None] = []
    for chunk in output.chunk(seen.n):
        owners = [r for r, given in enumerate(seen.inputs) if seen.same(chunk, given)]
        untouched = bool((chunk == BEFORE).all())
        found.append(None if untouched else next(iter(owners), -1))
    return found


# ── reduce_scatter ──────────────────────────────────────────────────────────────────


def wrong_scatter(seen: Outputs, expected: Sequence[Tensor]) -> Guess | None:
    """What is wrong with the outputs of a reduce_scatter, if it has a name."""
    n = seen.n
    if seen.are([right + BEFORE for right in expected]):
        return Guess(
            "output-not-empty",
            f"every rank's output is the sum plus its old value, {BEFORE:g}, expected "
            "the old value replaced",
            "output may hold any values: copy the first chunk, then add the others",
        )
    if seen.are([right / n for right in expected]):
        sentence = f"each rank has the mean, the sum divided by {n}, expected the sum"
        return Guess("mean-not-sum", sentence, "reduce_scatter sums")
    guess = _misdirected(seen)
    if guess:
        return guess
    found = [_parts_of(seen, output) for output in seen.outputs]
    parts = [part for part in found if part]
    if len(parts) < n:
        return None
    chunks, whose = [chunk for chunk, _ in parts], [ranks for _, ranks in parts]
    if all(len(ranks) == n for ranks in whose):
        return _misplaced(chunks)
    return _incomplete(whose) if chunks == [*range(n)] else None


def _misdirected(seen: Outputs) -> Guess | None:
    """A rank has sent the wrong chunk, or one that arrived was added for all."""
    n, cut = seen.n, [given.chunk(seen.n) for given in seen.inputs]
    own = [cut[rank][rank] for rank in range(n)]
    if n > 1 and seen.are([torch.stack(own).sum(0)] * n):
        return Guess(
            "",
            "every rank r added its own chunk r to the same sum, expected rank r to "
            "have the sum of all ranks' chunks r",
            FOR_THE_OTHER,
        )
    for other in range(1, n) if n > 2 else ():
        if seen.same(seen.outputs[0], own[0] + (n - 1) * cut[other][0]):
            often = "twice" if n == 3 else f"{n - 1} times"
            return Guess(
                "",
                f"rank 0 added rank {other}'s chunk {often} and no other rank's, "
                "expected every rank's chunk once",
                "each receive in flight needs its own receive buffer",
            )
    return None


def _misplaced(chunks: list[int]) -> Guess:
    """The sums are complete, but not on the ranks that they are for."""
    if len({*chunks}) == 1:
        sentence = f"every rank has chunk {chunks[0]} of the sum, expected chunk r on "
        sentence += "rank r"
        return Guess("wrong-chunk-order", sentence, FOR_THE_OTHER)
    odd = next(r for r, chunk in enumerate(chunks) if chunk != r)
    sentence = f"rank {odd} has chunk {chunks[odd]} of the sum, expected chunk {odd}"
    return Guess("wrong-chunk-order", sentence, FOR_THE_OTHER)


def _incomplete(whose: list[set[int]]) -> Guess:
    """The right chunks, but not of all ranks; `whose` they are, rank by rank."""
    everyone = {*range(len(whose))}
    if all(ranks == {r} for r, ranks in enumerate(whose)):
        return Guess(
            "own-chunk-only",
            "each rank has only its own input's chunk, with nothing added to it, "
            "expected the sum of all ranks' chunks",
            "the chunk is a chunk of the sum: add the other ranks' chunks",
        )
    if all(ranks == everyone - {r} for r, ranks in enumerate(whose)):
        return Guess(
            "own-value-missing",
            "each rank's sum lacks the rank's own chunk, expected the chunks of all "
            f"{len(whose)} ranks in it",
            "start from the rank's own chunk, then add the others",
        )
    odd = next(r for r, ranks in enumerate(whose) if ranks != everyone)
    if all(len(ranks) == 1 for ranks in whose):
        return Guess(
            "last-write-wins",
            f"rank {odd} has only rank {min(whose[odd])}'s chunk, as if each received "
            "chunk had replaced the sum, expected the sum of all",
            "receive into a receive buffer, then add the buffer",
        )
    lost = ranks_in_words(sorted(everyone - whose[odd]))
    sentence = f"rank {odd}'s sum lacks the chunk of {lost}, expected every rank's "
    sentence += "chunk once"
    return Guess("", sentence, "add every rank's chunk exactly once")


def _parts_of(seen: Outputs, output: Tensor) -> tuple[int, set[int]] | None:
    """Which chunk of which ranks' inputs add up to `output`, if that is what it is."""
    cut = torch.stack(seen.inputs).double().reshape(seen.n, seen.n, -1)
    masks = torch.tensor([*product((0.0, 1.0), repeat=seen.n)][1:]).double()
    for chunk in range(seen.n):
        for mask, total in zip(masks, masks @ cut[:, chunk], strict=True):
            if seen.same(output, total):
                return chunk, {*mask.nonzero().flatten().tolist()}
    return None
