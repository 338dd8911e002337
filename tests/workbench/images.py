"""Small image sets in IDX form, written by the tests themselves."""

from __future__ import annotations

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np

from distlab.data.idx_sets import NAMES, SIDE, KnownSet

NUM_TRAIN, NUM_HELD_OUT = 96, 40


def idx_bytes(values: np.ndarray, *, kind: int = 0x08) -> bytes:
    """`values` as the bytes of an IDX file."""
    sizes = struct.pack(f">{values.ndim}I", *values.shape)
    return bytes([0, 0, kind, values.ndim]) + sizes + values.tobytes()


def contents(seed: int = 0) -> dict[str, bytes]:
    """Four files: bright squares in ten places, which a network can tell apart."""
    generator = np.random.default_rng(seed)
    files = {}
    for count, (images, labels) in (
        (NUM_TRAIN, NAMES[:2]),
        (NUM_HELD_OUT, NAMES[2:]),
    ):
        targets = generator.integers(0, 10, count).astype(np.uint8)
        pixels = generator.integers(0, 60, (count, SIDE, SIDE)).astype(np.uint8)
        for image, target in zip(pixels, targets, strict=True):
            row, column = divmod(int(target), 4)
            image[row * 8 : row * 8 + 7, column * 7 : column * 7 + 6] = 255
        files[images], files[labels] = idx_bytes(pixels), idx_bytes(targets)
    return files


def write_set(folder: Path, *, packed: bool = False, **changed: bytes) -> Path:
    """The four files in `folder`; `changed` has other bytes for train_images, …"""
    folder.mkdir(parents=True, exist_ok=True)
    others = {name.replace("_", "-"): data for name, data in changed.items()}
    for name, data in contents().items():
        for start, other in others.items():
            data = other if name.startswith(start) else data
        path = folder / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(data) if packed else data)
    return folder


def known_set(*mirrors: str) -> KnownSet:
    """The set that `write_set` writes, as one that is known to the bit."""
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in contents().items()}
    return KnownSet(
        name="squares", title="Squares", mirrors=mirrors, places=(), sha256=sums
    )
