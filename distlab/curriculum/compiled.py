"""A unit's text on its way to ranks, with its code: compiled once, not by each rank.

To compile a unit takes a rank five times as long as to read its code. The code goes no
further than a run: another version of Python cannot read it, and what marshal reads
must be trusted. What is kept in a file is `travelling`.
"""

from __future__ import annotations

import base64
import contextlib
import marshal

from distlab.curriculum.units import SourceError, UnitSource, arrived, travelling

_CODE = "code"


def sent(source: UnitSource) -> dict[str, str]:
    """`travelling`, with the code; without it where the text is not Python."""
    parts = travelling(source)
    with contextlib.suppress(SourceError):  # who loads it will say so
        parts[_CODE] = base64.b64encode(marshal.dumps(source.code)).decode()
    return parts


def received(parts: dict[str, str]) -> UnitSource:
    """What `sent` was given."""
    source = arrived(parts)
    if _CODE in parts:
        # Where cached_property keeps it.
        vars(source)[_CODE] = marshal.loads(base64.b64decode(parts[_CODE]))
    return source
