"""`distlab explain`: what the name in a verdict's brackets means."""

from __future__ import annotations

import difflib

from distlab.cli.screen import show
from distlab.curriculum.misconceptions import read_misconceptions

_PARTS = (
    ("happened", "What was seen"),
    ("why", "Why"),
    ("fix", "What to change"),
    ("torch", "In torch.distributed"),
)


def explain(slug: str = "") -> int:
    """Print one explanation, or the list of all names.

    Raises:
        ValueError: no explanation has this name.
    """
    known = read_misconceptions()
    slug = slug.strip("[] ")
    if not slug:
        show(
            [("plain", f"{name:<26} {entry['title']}") for name, entry in known.items()]
        )
        return 0
    if slug not in known:
        near = [name for name in known if slug in name][:3]
        near = near or difflib.get_close_matches(slug, known, 3, 0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"no explanation is called {slug!r}{hint}")
    entry = known[slug]
    lines = [("plain", f"{slug}: {entry['title']}")]
    for key, heading in _PARTS:
        lines += [("plain", ""), ("rule", heading)]
        lines += [("plain", f"  {line}") for line in entry[key].strip().splitlines()]
    show(lines)
    return 0
