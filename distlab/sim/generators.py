"""Random numbers, for each rank its own, in a process that has one generator.

To swap the generator's state whenever ranks are swapped costs as much as all the rest
of a message: 5 KB are read, and with 1,024 ranks from far away. Most ranks draw before
they first talk, or never. So after its first turn a rank that has drawn nothing is not
given its own state again; each time it stops, the generator's memory is looked at, and
if it has drawn after all, it drew the wrong numbers: then the run starts over, with a
swap at every turn. Where that memory is not as expected, there always is one.
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
    """A rank that had drawn nothing drew now: the run has to swap at every turn."""


@dataclass(frozen=True)
class Source:
    """One generator of this process. `look` is a quick look at all that it holds.

    `word` has how many of its words are used up, and the first one, which is another
    one when all have been: it changes whenever one is drawn.
    """

    seed: Callable[[int], object]
    get: Callable[[], Any]
    set: Callable[[Any], object]
    look: Callable[[], object] | None
    word: Any = None


class OwnNumbers:
    """What one rank finds in one generator when it goes on."""

    __slots__ = ("drew", "seed", "seen", "seen_word", "state")

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.drew = False
        self.state: Any = None
        self.seen: object = None  # a look at the generator with that state in it
        self.seen_word = _NO_WORD


class Generators(Protocol):
    """The generators of this process, as the ranks take turns with them.

    Where there is a `word` to glance at, `take` need not be called while its value is
    `seen_word`, nor `put` for a rank that never `drew`.
    """

    word: Any
    seen_word: int
    anyone_drew: bool

    def own(self, seed: int) -> Any:
        """What a rank keeps between its turns."""

    def begin(self, own: Any) -> None:
        """A rank begins its first turn."""

    def put(self, own: Any) -> None:
        """A rank goes on."""

    def take(self, own: Any) -> None:
        """A rank stops.

        Raises:
            DrewLate: it drew, and had not been given its own state.
        """

    def restore(self) -> None:
        """All is as it was before the run."""


class OneGenerator:
    """Generators of which there is one.

    If it is `lazy`, a rank may turn out to have drawn too late: DrewLate. What a
    rank that has drawn nothing yet reads with get_rng_state() may then be another's.
    """

    def __init__(self, source: Source, lazy: bool) -> None:
        self._source, self._look = source, source.look
        self._before = source.get()
        self._lazy = lazy and source.look is not None
        self._seen: object = None  # what the last one who drew left behind
        self.word, self.seen_word = source.word if self._lazy else None, _NO_WORD
        self.anyone_drew = False

    def own(self, seed: int) -> OwnNumbers:
        """See `Generators.own`."""
        return OwnNumbers(seed)

    def begin(self, own: OwnNumbers) -> None:
        """See `Generators.begin`."""
        self._source.seed(own.seed)
        if self._look is not None:
            self._seen = own.seen = self._look()
        if self.word is not None:
            self.seen_word = own.seen_word = self.word.value
        if not self._lazy:
            own.state = self._source.get()

    def put(self, own: OwnNumbers) -> None:
        """See `Generators.put`."""
        if own.drew or not self._lazy:
            self._source.set(own.state)
            self._seen, self.seen_word = own.seen, own.seen_word

    def take(self, own: OwnNumbers) -> None:
        """See `Generators.take`."""
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
        """See `Generators.restore`."""
        self._source.set(self._before)


class SeveralGenerators:
    """Generators of which there are several, or other things that ranks keep apart."""

    def __init__(self, parts: Sequence[Generators]) -> None:
        self._all = parts
        self.word, self.seen_word, self.anyone_drew = None, _NO_WORD, True

    def own(self, seed: int) -> list[Any]:
        """See `Generators.own`."""
        return [one.own(seed) for one in self._all]

    def begin(self, own: list[Any]) -> None:
        """See `Generators.begin`."""
        for one, numbers in zip(self._all, own, strict=True):
            one.begin(numbers)

    def put(self, own: list[Any]) -> None:
        """See `Generators.put`."""
        for one, numbers in zip(self._all, own, strict=True):
            one.put(numbers)

    def take(self, own: list[Any]) -> None:
        """See `Generators.take`."""
        for one, numbers in zip(self._all, own, strict=True):
            one.take(numbers)

    def restore(self) -> None:
        """See `Generators.restore`."""
        for one in self._all:
            one.restore()


def make_generators(*, lazy: bool, every: bool) -> Generators:
    """Torch's generator, or with `every` also those of `random` and numpy."""
    if not every:
        return OneGenerator(torchs(), lazy)
    sources = (torchs(), pythons(), numpys())
    return SeveralGenerators([OneGenerator(source, lazy) for source in sources])


def torchs() -> Source:
    """Torch's default generator."""
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
    """Whether the second of two normal numbers, drawn together, waits for its turn."""
    return bool(state[_STATE_WORDS + 8 * _WORDS :].any())


def pythons() -> Source:
    """The generator behind the functions of `random`."""
    inner: Any = random._inst
    memory = _object_memory(inner)
    return Source(
        random.seed,
        random.getstate,
        random.setstate,
        lambda: (memory.raw, inner.gauss_next),  # the second of a pair, kept apart
    )


def numpys() -> Source:
    """The generator behind the functions of `numpy.random`."""
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
    """The bytes of an object, without the head in which references are counted."""
    head = object.__basicsize__
    size = type(thing).__basicsize__ - head
    return (ctypes.c_char * size).from_address(id(thing) + head)


def engine_memory(generator: torch.Generator) -> Any:
    """The bytes that change when `generator` is drawn from; None if not to be found.

    What is looked for is the 64-bit seed and, 20 bytes on, the words of the engine,
    packed; the state that torch hands out has the same ones in 8 bytes each.
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
