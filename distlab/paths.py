"""Paths: how one is shown to a person, what lies above it, and whose code it has."""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_LIBRARIES = {
    os.path.join(os.path.realpath(folder), "")
    for folder in (
        *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib")),
        *(sysconfig.get_path(kind) for kind in ("purelib", "platlib")),
        *site.getsitepackages(),
        os.path.dirname(__file__),
    )
}


def shown(path: Path | str) -> str:
    """A path as one would type it from here: relative, unless it is far away."""
    absolute = str(path)
    relative = os.path.relpath(absolute)
    return relative if relative.count("..") <= 2 else absolute


def parents_of(path: str) -> Iterator[str]:
    """The folders above an absolute path, innermost first: Path's `parents`, faster."""
    while (above := os.path.dirname(path)) != path:
        yield above
        path = above


@functools.cache
def is_users_code(file: str) -> bool:
    """Return True for code that isn't Python's, an installed package's or distlab's.

    `file` is a source file, the folder of a package, or a code object's `co_filename`,
    which may be relative or name no file at all.
    """
    if file.startswith("<"):
        return False
    inside = os.path.join(os.path.realpath(file), "")
    if f"{os.sep}site-packages{os.sep}" in inside:
        return False
    torch = getattr(sys.modules.get("torch"), "__file__", None)  # built from source
    built = {os.path.join(os.path.dirname(torch), "")} if torch else set()
    return not any(inside.startswith(folder) for folder in _LIBRARIES | built)
