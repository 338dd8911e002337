"""How many threads torch may use for what is reckoned beside the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it torch reckons on one thread in this process, as the ranks do.

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
