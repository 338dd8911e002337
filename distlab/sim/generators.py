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
_REACH = 512  # bytes of the object in which its engine begins
_CACHES = 24  # behind the words: normal numbers drawn in pairs, of which one waits


class DrewLate(Exception):  # noqa: N818 - the run is in order, but not possible so
    """A rank that had drawn nothing drew now: the run has to swap at every turn."""


@dataclass(frozen=True)
class Source:
    """One generator of this process. `look` is a quick look at all that it holds."""

    seed: Callable[[int], object]
    get: Callable[[], Any]
    set: Callable[[Any], object]
    look: Callable[[], object] | None


class OwnNumbers:
    """What one rank finds in one generator when it goes on."""

    __slots__ = ("drew", "seed", "seen", "state")

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.drew = False
        self.state: Any = None
        self.seen: object = None  # a look at the generator with that state in it


class Generators(Protocol):
    """The generators of this process, as the ranks take turns with them."""

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

    def own(self, seed: int) -> OwnNumbers:
        """See `Generators.own`."""
        return OwnNumbers(seed)

    def begin(self, own: OwnNumbers) -> None:
        """See `Generators.begin`."""
        self._source.seed(own.seed)
        if self._look is not None:
            self._seen = own.seen = self._look()
        if not self._lazy:
            own.state = self._source.get()

    def put(self, own: OwnNumbers) -> None:
        """See `Generators.put`."""
        if own.drew or not self._lazy:
            self._source.set(own.state)
            self._seen = own.seen

    def take(self, own: OwnNumbers) -> None:
        """See `Generators.take`."""
        look = self._look
        if look is None:
            own.state = self._source.get()
        elif look() != self._seen:
            if self._lazy and not own.drew and self._seen is not own.seen:
                raise DrewLate
            own.drew, own.state = True, self._source.get()
            self._seen = own.seen = look()

    def restore(self) -> None:
        """See `Generators.restore`."""
        self._source.set(self._before)


class SeveralGenerators:
    """Generators of which there are several."""

    def __init__(self, sources: Sequence[Source], lazy: bool) -> None:
        self._all = [OneGenerator(source, lazy) for source in sources]

    def own(self, seed: int) -> list[OwnNumbers]:
        """See `Generators.own`."""
        return [one.own(seed) for one in self._all]

    def begin(self, own: list[OwnNumbers]) -> None:
        """See `Generators.begin`."""
        for one, numbers in zip(self._all, own, strict=True):
            one.begin(numbers)

    def put(self, own: list[OwnNumbers]) -> None:
        """See `Generators.put`."""
        for one, numbers in zip(self._all, own, strict=True):
            one.put(numbers)

    def take(self, own: list[OwnNumbers]) -> None:
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
    return SeveralGenerators([torchs(), pythons(), numpys()], lazy)


def torchs() -> Source:
    """Torch's default generator."""
    generator = torch.default_generator
    memory = engine_memory(generator)
    return Source(
        generator.manual_seed,
        generator.get_state,
        generator.set_state,
        None if memory is None else partial(getattr, memory, "raw"),
    )


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
