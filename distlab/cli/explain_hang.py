"""`distlab explain-hang`: why a job hung, from the dumps of torch's flight recorder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distlab.cli.screen import show, show_json
from distlab.flight import as_json, find_hang, page, read_dumps
from distlab.grading.verdict import FAILED, PASS


def explain_hang(
    files: Sequence[Path],
    *,
    num_ranks: int = 0,
    as_json_object: bool = False,
    html: Path | None = None,
) -> int:
    """Print the disagreement and a table of the ranks; 0 if no rank waits, else 1.

    Raises:
        ValueError: a file is not a dump, or there are two for one rank.
        OSError: the page can't be written.
    """
    records = read_dumps(files, num_ranks)
    hang = find_hang(records)
    if as_json_object:
        show_json(as_json(records, hang))
    else:
        show(page(records, hang))
    if html is not None:
        from distlab.flight.drawn import draw

        is_fine = hang.kind == "finished"
        draw(html, records, hang.sentence, "finished" if is_fine else "deadlock")
    return PASS if hang.kind == "finished" else FAILED
