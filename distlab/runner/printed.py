"""What the processes of a run print: the first so many bytes of each, as text."""

from __future__ import annotations

import codecs
import os
import select


class Printed:
    """Decodes what comes in pieces; characters may be cut anywhere."""

    def __init__(self, count: int, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._decoders = [_decoder() for _ in range(count)]
        self._num_kept = [0 for _ in range(count)]  # bytes

    def text(self, number: int, piece: bytes) -> str:
        """What is kept of the next piece that process `number` has printed."""
        kept = piece[: self._limit - self._num_kept[number]]
        self._num_kept[number] += len(kept)
        return self._decoders[number].decode(kept)

    def rest(self, number: int, output: int) -> str:
        """What a dead process had printed last; another one prints after it."""
        text = ""
        while select.select([output], [], [], 0)[0]:
            piece = os.read(output, 1 << 16)
            if not piece:
                break
            text += self.text(number, piece)
        self._decoders[number] = _decoder()
        return text


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")
