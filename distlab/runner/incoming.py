"""Lines from a rank: only whole records count, for its program can write there too."""

from __future__ import annotations

from typing import Any

from distlab.runner.wire import decode

_NUMBER = (int, float)
_CALL: dict[str, Any] = {
    "n": int,
    "op": str,
    "group": str,
    "members": list,
    "file": str,
    "line": int,
    "tag": int,
}
_CALL_KEYS = (
    *("dst", "src", "root", "reduce", "via", "timeout_s", "thread", "threads"),
    *("shape", "dtype", "into_shape", "into_dtype", "bytes", "ptr"),
)
_CALL |= dict.fromkeys(_CALL_KEYS, object)
_FIELDS: dict[str, dict[str, Any]] = {
    "ready": {},
    "report": {"value": object},
    "result": {
        "value": object,
        "sent_bytes": _NUMBER,
        "messages": int,
        "in_calls_s": _NUMBER,
    },
    "raised": {
        "type": str,
        "message": str,
        "frames": list,
        "refused": str,
        "peer_lost": bool,
    },
    "enter": _CALL,
    "post": _CALL,
    "wait": {"n": int, "file": str, "line": int},
    "exit": {"n": int},
    "error": {"n": int, "type": str, "message": str, "refused": bool},
}


def record_in(line: bytes) -> dict[str, Any] | None:
    """The record that `line` holds; None for anything else."""
    try:
        message = decode(line)
    except ValueError:
        return None
    if not isinstance(message, dict) or not isinstance(message.get("k"), str):
        return None
    fields = _FIELDS.get(message["k"])
    if fields is None or not _has(message, fields):
        return None
    if not all(_is_frame(frame) for frame in message.get("frames", ())):
        return None
    return message


def _has(message: dict[str, Any], fields: dict[str, Any]) -> bool:
    return all(
        name in message and isinstance(message[name], kind)
        for name, kind in fields.items()
    )


def _is_frame(frame: object) -> bool:
    if not isinstance(frame, tuple | list) or len(frame) != 2:
        return False
    return isinstance(frame[0], str) and isinstance(frame[1], int)
