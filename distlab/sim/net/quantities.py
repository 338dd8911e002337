"""Times, sizes, speeds and shares as people write them: 10us, 4MiB, 100Gbit, 1%.

    time    ns us µs ms s          10us   0.2s   0 needs no unit
    size    B kB MB GB TB          4MB = 4,000,000 bytes
            KiB MiB GiB            4MiB = 4 · 1024² bytes
    speed   bit kbit Mbit Gbit Tbit, or a size per second
                                   100Gbit = 100Gbit/s = 12.5GB/s
    share   1% = 0.01

Case counts, because Mb and MB differ by eight and people mix them up: Mb is refused.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from decimal import Decimal

_TIMES = {"ns": 10**9, "us": 10**6, "µs": 10**6, "ms": 10**3, "s": 1}  # per second
_SIZES: dict[str, int] = {
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("kMGT", 1)},
    **{f"{p}iB": 1024**i for i, p in enumerate("KMG", 1)},
}
_SPEEDS: dict[str, float] = {
    **{f"{p}bit": 1000**i / 8 for i, p in enumerate(("", "k", "M", "G", "T"))},
    **{f"{p}bit/s": 1000**i / 8 for i, p in enumerate(("", "k", "M", "G", "T"))},
    **{f"{unit}/s": float(size) for unit, size in _SIZES.items()},
}
_NUMBER = re.compile(
    r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*(.*)", re.DOTALL
)


def time_words(seconds: float) -> str:
    """Format a time with four digits and a unit: 0.0123 → `12.3 ms`.

    Less than half a picosecond is what rounding leaves of 0.
    """
    if abs(seconds) < 5e-13:
        return "0 ns"
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e9:.4g} ns"


def seconds(text: str) -> float:
    """Read a time: `10us` → 1e-05.

    Raises:
        ValueError: it isn't a time, is negative, or has an unknown unit.
    """
    number, unit = _parts(text, "a time", "10us")
    if not unit and number == 0:
        return 0.0
    _require_unit(text, unit, "a time", "10us", _TIMES)
    return float(number / _TIMES[unit])


def num_bytes(text: str) -> int:
    """Read a size: `4MiB` → 4194304; a number without a unit is bytes.

    Raises:
        ValueError: it isn't a size, or not an integer number of bytes.
    """
    number, unit = _parts(text, "a size", "4MiB")
    _require_unit(text, unit or "B", "a size", "4MiB", _SIZES)
    size = number * _SIZES[unit or "B"]
    if size != int(size):
        raise ValueError(f'"{text}" is {size} bytes, which is not an integer')
    return int(size)


def bytes_per_s(text: str) -> float:
    """Read a speed: `100Gbit` → 1.25e10; `inf` is a wire that takes no time.

    Raises:
        ValueError: it isn't a speed, or is zero.
    """
    if text.strip() == "inf":
        return math.inf
    number, unit = _parts(text, "a speed", "100Gbit")
    if unit in _SIZES:
        raise ValueError(f'"{text}" is a size: a speed in bytes is {text}/s')
    _require_unit(text, unit, "a speed", "100Gbit", _SPEEDS)
    if number == 0:
        raise ValueError(f'"{text}": a speed must be above 0')
    return float(number) * _SPEEDS[unit]


def share(text: str) -> float:
    """Read a share: `1%` → 0.01, and `0.01` → 0.01.

    Raises:
        ValueError: it isn't a number from 0 to 1.
    """
    number, unit = _parts(text, "a share", "1%")
    if unit:
        _require_unit(text, unit, "a share", "1%", ("%",))
        number /= 100
    if number > 1:
        raise ValueError(f'"{text}" is no share: 0% to 100%')
    return float(number)


def factor(text: str) -> float:
    """Read a factor: `2.5` → 2.5.

    Raises:
        ValueError: it isn't a number, or is negative.
    """
    number, unit = _parts(text, "a number", "2.5")
    _require_unit(text, unit, "a number", "2.5", ("",))
    return float(number)


def whole(text: str) -> int:
    """Read a whole number: `8` → 8.

    Raises:
        ValueError: it isn't an integer, or is negative.
    """
    if not re.fullmatch(r"\d{1,18}", text.strip(), re.ASCII):
        raise ValueError(f'"{text}" is not an integer')
    return int(text)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean NEAREST?)`, or "" if no known word is similar."""
    names = list(known)
    near = [name for name in names if name.lower() == word.lower()]
    near = near or difflib.get_close_matches(word, names, 1, 0.5)
    return f" (did you mean {near[0]}?)" if near else ""


def _parts(text: str, what: str, example: str) -> tuple[Decimal, str]:
    """Return the number and the unit after it."""
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        raise ValueError(f'"{text}" is not {what}, such as {example}')
    if not 0 <= float(found[1]) < math.inf:
        raise ValueError(f'"{text}" is not {what}, because it is negative or infinite')
    return Decimal(found[1]), found[2].strip()  # exact: 0.08 / 10⁹ is 8e-11


def _require_unit(
    text: str, unit: str, what: str, example: str, units: Iterable[str]
) -> None:
    if unit in units:
        return
    known = [name for name in units if name]
    if not known:
        raise ValueError(f'"{text}" is not {what}, such as {example}')
    said = f"there is no unit {unit}" if unit else "the unit is missing"
    near = nearest(unit, known)
    names = " ".join(known)
    raise ValueError(f'"{text}" is not {what}: {said}{near}; known are {names}')
