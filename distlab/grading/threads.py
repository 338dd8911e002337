"""How many threads torch may use for what the grader itself computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it torch computes on one thread in this process, as in the ranks.

    On models as small as those of the checks a second one only waits; on a busy
    machine, for minutes.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
