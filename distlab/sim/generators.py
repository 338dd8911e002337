"""Give each rank its own random numbers, in a process that has only one generator.

Swapping the generator's state whenever ranks change would cost as much as the rest of a
message, because it reads 5 KB, which with 1,024 ranks aren't in a cache. Most ranks
draw before they first communicate, or never. So if a rank has drawn nothing in its
first turn, we don't give it its own state again. Each time it stops, we look at the
generator's memory. If the rank has drawn after all, it drew the wrong numbers, so the
run starts over and swaps at every turn. If we don't recognize that memory, we always
swap.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy
import torch

_WORDS = 624  # of a Mersenne Twister
_NEXT = 16  # where its engine counts the words that are used up; they follow
_STATE_WORDS = 24  # where they begin in the state that torch hands out, 8 bytes each
_REACH = 512  # bytes of the object in which its engine begins
_CACHES = 24  # behind the words: normal numbers drawn in pairs, of which one waits
_NO_WORD = -1  # equal to none: what changes may be elsewhere


class DrewLate(Exception):  # noqa: N818 - the run is in order, but not possible so
    """Raised if a rank draws its first number late, so the run must always swap."""


@dataclass(frozen=True)
class Source:
    """One generator of this process; `look` quickly compares all that it holds.

    `word` holds how many of its words have been used, and the first word, which changes
    when all have been. It therefore changes whenever a word is drawn.
    """

    seed: Callable[[int], object]
    get: Callable[[], Any]
    set: Callable[[Any], object]
    look: Callable[[], object] | None
    word: Any = None


class OwnNumbers:
    """The state that one rank finds in one generator when it continues."""

    __slots__ = ("drew", "seed", "seen", "seen_word", "state")

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.drew = False
        self.state: Any = None
        self.seen: object = None  # a look at the generator with that state in it
        self.seen_word = _NO_WORD


class Generators(Protocol):
    """The generators of this process, as the ranks take turns with them.

    If there is a `word` to look at, you needn't call `take` while its value is
    `seen_word`, nor `put` for a rank that never `drew`.
    """

    word: Any
    seen_word: int
    anyone_drew: bool

    def own(self, seed: int) -> Any:
        """Return the state that a rank keeps between its turns."""

    def begin(self, own: Any) -> None:
        """Prepare for the first turn of a rank."""

    def put(self, own: Any) -> None:
        """Restore a rank's state when it continues."""

    def take(self, own: Any) -> None:
        """Store a rank's state when it stops.

        Raises:
            DrewLate: the rank drew numbers without its own state.
        """

    def restore(self) -> None:
        """Restore the state from before the run."""


class OneGenerator:
    """Swaps the state of a single generator.

    If it is `lazy`, a rank may turn out to have drawn too late, which raises DrewLate.
    As long as a rank hasn't drawn, get_rng_state() may show it another rank's state.
    """

    def __init__(self, source: Source, lazy: bool) -> None:
        self._source, self._look = source, source.look
        self._before = source.get()
        self._lazy = lazy and source.look is not None
        self._seen: object = None  # what the last one who drew left behind
        self.word, self.seen_word = source.word if self._lazy else None, _NO_WORD
        self.anyone_drew = False

    def own(self, seed: int) -> OwnNumbers:
        """Implement `Generators.own`."""
        return OwnNumbers(seed)

    def begin(self, own: OwnNumbers) -> None:
        """Implement `Generators.begin`."""
        self._source.seed(own.seed)
        if self._look is not None:
            self._seen = own.seen = self._look()
        if self.word is not None:
            self.seen_word = own.seen_word = self.word.value
        if not self._lazy:
            own.state = self._source.get()

    def put(self, own: OwnNumbers) -> None:
        """Implement `Generators.put`."""
        if own.drew or not self._lazy:
            self._source.set(own.state)
            self._seen, self.seen_word = own.seen, own.seen_word

    def take(self, own: OwnNumbers) -> None:
        """Implement `Generators.take`."""
        look = self._look
        if look is None:
            own.state = self._source.get()
        elif look() != self._seen:
            if self._lazy and not own.drew and self._seen is not own.seen:
                raise DrewLate
            own.drew, own.state = True, self._source.get()
            self.anyone_drew = True
            self._seen = own.seen = look()
            if self.word is not None:  # a number of a pair may wait: then it is no help
                own.seen_word = _NO_WORD if _has_pair(own.state) else self.word.value
                self.seen_word = own.seen_word

    def restore(self) -> None:
        """Implement `Generators.restore`."""
        self._source.set(self._before)


class SeveralGenerators:
    """Swaps the states of several generators."""

    def __init__(self, parts: Sequence[Generators]) -> None:
        self._all = parts
        self.word, self.seen_word, self.anyone_drew = None, _NO_WORD, True

    def own(self, seed: int) -> list[Any]:
        """Implement `Generators.own`."""
        return [one.own(seed) for one in self._all]

    def begin(self, own: list[Any]) -> None:
        """Implement `Generators.begin`."""
        for one, numbers in zip(self._all, own, strict=True):
            one.begin(numbers)

    def put(self, own: list[Any]) -> None:
        """Implement `Generators.put`."""
        for one, numbers in zip(self._all, own, strict=True):
            one.put(numbers)

    def take(self, own: list[Any]) -> None:
        """Implement `Generators.take`."""
        for one, numbers in zip(self._all, own, strict=True):
            one.take(numbers)

    def restore(self) -> None:
        """Implement `Generators.restore`."""
        for one in self._all:
            one.restore()


def make_generators(*, lazy: bool, every: bool) -> Generators:
    """Return torch's generator, or with `every` also those of `random` and numpy."""
    if not every:
        return OneGenerator(torchs(), lazy)
    sources = (torchs(), pythons(), numpys())
    return SeveralGenerators([OneGenerator(source, lazy) for source in sources])


def torchs() -> Source:
    """Return torch's default generator."""
    generator = torch.default_generator
    memory = engine_memory(generator)
    return Source(
        generator.manual_seed,
        generator.get_state,
        generator.set_state,
        None if memory is None else partial(getattr, memory, "raw"),
        None if memory is None else _word(memory),
    )


def _word(memory: Any) -> Any:
    at = ctypes.addressof(memory) + _NEXT
    return ctypes.c_uint64.from_address(at)


def _has_pair(state: torch.Tensor) -> bool:
    """Return True if the second of two normal numbers drawn together is unused."""
    return bool(state[_STATE_WORDS + 8 * _WORDS :].any())


def pythons() -> Source:
    """Return the generator behind the functions of `random`."""
    inner: Any = random._inst
    memory = _object_memory(inner)
    return Source(
        random.seed,
        random.getstate,
        random.setstate,
        lambda: (memory.raw, inner.gauss_next),  # the second of a pair, kept apart
    )


def numpys() -> Source:
    """Return the generator behind the functions of `numpy.random`."""
    inner: Any = numpy.random.mtrand._rand
    state: Any = numpy.random.get_state()
    words = state[1]
    address = inner._bit_generator.ctypes.state_address
    engine = (ctypes.c_char * (words.nbytes + 4)).from_address(address)
    memory = _object_memory(inner)  # the second of a pair is kept here
    return Source(
        numpy.random.seed,
        numpy.random.get_state,
        numpy.random.set_state,
        lambda: (engine.raw, memory.raw),
    )


def _object_memory(thing: object) -> Any:
    """Return the bytes of an object, without the head that counts references."""
    head = object.__basicsize__
    size = type(thing).__basicsize__ - head
    return (ctypes.c_char * size).from_address(id(thing) + head)


def engine_memory(generator: torch.Generator) -> Any:
    """Return the bytes that change when you draw from `generator`; None if not found.

    We search for the 64-bit seed and, 20 bytes after it, the packed words of the
    engine. The state that torch returns holds the same words in 8 bytes each.
    """
    address = getattr(generator, "_cdata", 0)
    if not address:
        return None
    state = generator.get_state().numpy().tobytes()
    words = b"".join(state[24 + 8 * i : 28 + 8 * i] for i in range(_WORDS))
    head = ctypes.string_at(address, _REACH)
    at = head.find(state[:8] + state[8:12])
    if at < 0 or head[at + 20 : at + 20 + 64] != words[:64]:
        return None
    memory = (ctypes.c_char * (20 + len(words) + _CACHES)).from_address(address + at)
    return memory if memory.raw[20 : 20 + len(words)] == words else None
