"""The canvas of all pictures, and how they are written to files.

The colors are those of `distlab.trace.palette`.
"""

from __future__ import annotations

from pathlib import Path

from distlab.trace.canvas import MONO, SANS, Canvas, num

__all__ = ["MONO", "SANS", "Canvas", "num", "write"]


def write(pictures: dict[str, str], folder: Path) -> list[Path]:
    """Write each picture under its file name, with the same line ends everywhere."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, svg in sorted(pictures.items()):
        path = folder / name
        path.write_text(svg, encoding="utf-8", newline="\n")
        paths.append(path)
    return paths
