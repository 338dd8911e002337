"""Whether what came out of a simulated run is right, where that can be known.

The name of a function says what it is for: all_reduce, broadcast, all_gather,
reduce_scatter, with anything around it. The numbers are whole and small, so sums are
exact in float32, in whatever order they were added.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from distlab.sim import SimRun
from distlab.sim.faults import node_words
from distlab.sim.net.links import PS, picoseconds
from distlab.sim.net.quantities import time_words

KINDS = {
    "all_reduce": "the sum of all ranks' tensors",
    "reduce_scatter": "each rank's chunk of the sum",
    "all_gather": "all ranks' tensors in order",
    "broadcast": "rank 0's tensor",
}
"""What a function does, and what it leaves on every rank."""
ALL_REDUCES = ("hierarchical", "recursive_doubling", "halving_doubling")
"""Their names say how, not what."""


def kind_of(function: str) -> str:
    """One of KINDS, or nothing."""
    if function in ALL_REDUCES:
        return "all_reduce"
    return next((kind for kind in KINDS if function.endswith(kind)), "")


def own_numbers(seed: int, rank: int, size: int) -> Tensor:
    """A rank's tensor: whole numbers that differ from rank to rank."""
    generator = torch.Generator().manual_seed(seed * 7919 + rank)
    return torch.randint(-8, 9, (size,), generator=generator).float()


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Equal if and only if the bits are."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def left_behind(arguments: dict[str, Any], returned: Any) -> list[Tensor]:
    """What a call has written into; or returned, if it got nothing to write into."""
    models = [value for value in arguments.values() if isinstance(value, nn.Module)]
    if not models:
        written = ("output", "incoming", "tensor")
        found = [arguments[name] for name in written if name in arguments]
        return found[:1] or ([returned] if isinstance(returned, Tensor) else [])
    parameters = [p for model in models for p in model.parameters()]
    return [*parameters, *(p.grad for p in parameters if p.grad is not None)]


def left_word(function: str, arguments: dict[str, Any], returned: Any) -> str:
    """What a call has left behind, in a word: a digest.

    A reduce_scatter in place says which chunk is done; its number stands in front.
    """
    in_place = kind_of(function) == "reduce_scatter" and "tensor" in arguments
    if not in_place or type(returned) is not int:
        return digest_of(left_behind(arguments, returned))
    chunks = arguments["tensor"].chunk(arguments["comm"].world_size)
    done = chunks[returned : returned + 1] if returned >= 0 else ()
    return f"{returned}:{digest_of(done)}"


def _is_right(word: str, rank: int, right: list[str], words: list[str]) -> bool:
    """Whether a rank has what is right there; or the chunk that it says, alone."""
    number, _, digest = word.rpartition(":")
    if not number:
        return digest == right[rank]
    alone = sum(other.startswith(f"{number}:") for other in words) == 1
    return alone and int(number) < len(right) and digest == right[int(number)]


def expected(kind: str, seed: int, n: int, count: int) -> list[str]:
    """The digest of what each rank must have, where the whole tensor has `count`."""
    if kind == "all_gather":
        parts = [own_numbers(seed, rank, count // n) for rank in range(n)]
        return [digest_of([torch.cat(parts)])] * n
    if kind == "broadcast":
        return [digest_of([own_numbers(seed, 0, count)])] * n
    total = torch.zeros(count)
    for rank in range(n):
        total += own_numbers(seed, rank, count)
    if kind == "all_reduce":
        return [digest_of([total])] * n
    return [digest_of([chunk]) for chunk in total.chunk(n)]


def _found_to_be(digest: str, seed: int, n: int, count: int) -> str:
    """What all ranks have, of a function whose name says nothing."""
    for kind in ("all_reduce", "broadcast"):
        if digest == expected(kind, seed, n, count)[0]:
            return KINDS[kind]
    return ""


def judged(
    functions: list[str], values: list[Any], seed: int, count: int
) -> dict[str, Any]:
    """What is told of the results: how many there are, and who has a wrong one.

    `values` has a digest per function for each rank that came to its end.
    """
    n = len(values)
    wrong: set[int] = set()
    kinds = [kind_of(name) for name in functions]
    if all(value is not None for value in values):
        for place, kind in enumerate(kinds):
            if kind:
                right = expected(kind, seed, n, count)
                words = [value[place] for value in values]
                wrong |= {
                    rank
                    for rank, word in enumerate(words)
                    if not _is_right(word, rank, right, words)
                }
    there = {tuple(value) for value in values if value is not None}
    known = " and ".join(KINDS[kind] for kind in kinds if kind)
    if len(there) == 1 and len(kinds) == 1 and not known:
        known = _found_to_be(values[0][0], seed, n, count)
    return {
        "results": len(there),
        "known": known,
        "is_named": all(kinds),
        "wrong_ranks": sorted(wrong),
    }


def unstruck(done: SimRun, faults: dict[str, Any]) -> list[str]:
    """Which of the `faults` that were asked for never came to pass, in words."""
    died = {fault.node for fault in done.struck if fault.kind == "kill"}
    over = "the run was over before"
    words = [
        f"{node_words(node)} was to die at {time_words(at_s)}: {over}"
        for node, at_s in faults.get("kill", {}).items()
        if node not in died
    ]
    if faults.get("loss") and not done.lost:
        words.append(f"none of the {len(done.trace)} messages was lost")
    if faults.get("duplicate") and not done.num_duplicates:
        words.append(f"none of the {len(done.trace)} messages came twice")
    for _, from_s, _ in faults.get("partitions", ()):
        if from_s >= done.time_s:
            begins = time_words(from_s)
            words.append(f"the partition was to begin at {begins}: {over}")
    for name, kind in (("restart", "crash"), ("freeze", "freeze")):
        struck = {(one.node, one.at_ps) for one in done.struck if one.kind == kind}
        words += [
            f"{node_words(node)} was to {kind} at {time_words(from_s)}: {over}"
            for node, from_s, _ in faults.get(name, ())
            if (node, picoseconds(from_s)) not in struck
        ]
    crashed = {
        (node, from_s)
        for node, from_s, to_s in faults.get("torn", ())
        for one in done.struck
        if (one.node, one.kind) == (node, "crash") and from_s <= one.at_ps / PS <= to_s
    }
    words += [
        f"{node_words(node)} was to crash in an operation on its disk: there was none, "
        "or too few"
        for node, from_s, _ in faults.get("torn", ())
        if (node, from_s) not in crashed
    ]
    return words
