"""The heap of this process on huge pages, so that a fork has less to copy.

A fork copies one entry of the page table for each page of memory that is not shared
with a file: with torch imported, tens of thousands of 4 KiB pages. And the first write
to one of them costs the child a fault. On 2 MiB pages there are 512 times fewer
entries, and the kernel divides a page when a child writes to it.

Source: madvise(2), MADV_COLLAPSE, Linux 6.1 or newer. Elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

_MADV_COLLAPSE = 25
_PAGE_BYTES = 2 << 20
_STEP_BYTES = 2 * _PAGE_BYTES  # about 10 ms
_MAPS = Path("/proc/self/maps")


def moves_to_huge_pages() -> Iterator[None]:
    """Move what is writable and in no file, a few pages with each step."""
    if not _MAPS.exists():
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for first, end in _heap():
        for place in range(first, end, _STEP_BYTES):
            # A kernel that does not know this says so, and all is as it was.
            madvise(place, min(_STEP_BYTES, end - place), _MADV_COLLAPSE)
            yield


def _heap() -> Iterator[tuple[int, int]]:
    """Where it is, in whole huge pages."""
    for line in _MAPS.read_text(encoding="utf-8").splitlines():
        addresses, access, _offset, _device, _inode, *name = line.split(maxsplit=5)
        if access == "rw-p" and name in ([], ["[heap]"]):
            first, end = (int(address, 16) for address in addresses.split("-"))
            yield (
                -(-first // _PAGE_BYTES) * _PAGE_BYTES,
                end // _PAGE_BYTES * _PAGE_BYTES,
            )
