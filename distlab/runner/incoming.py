"""Lines from a rank: only whole records count, for its program can write there too."""

from __future__ import annotations

from typing import Any

from distlab.runner.wire import decode

_NUMBER = (int, float)
_MAYBE_RANK = (int, type(None))
_NUMBERS = ("members", "shape", "into_shape")  # lists of them
_LIST, _TEXT = (list, type(None)), (str, type(None))
_MAYBE_NUMBER = (int, float, type(None))
_CALL: dict[str, Any] = {
    "n": int,
    "t": _NUMBER,
    "op": str,
    "group": str,
    "members": list,
    "tag": int,
    "bytes": _NUMBER,
    "ptr": int,
    "file": str,
    "line": int,
    "via": object,
    "timeout_s": _MAYBE_NUMBER,
    "thread": int,
    "threads": int,
    **dict.fromkeys(("dst", "src", "root"), _MAYBE_RANK),
    **dict.fromkeys(("shape", "into_shape"), _LIST),
    **dict.fromkeys(("dtype", "into_dtype", "reduce"), _TEXT),
}
_WAIT = ("n", "t", "file", "line", "timeout_s", "thread", "threads")
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
    "wait": {key: _CALL[key] for key in _WAIT},
    "exit": {"n": int, "t": _NUMBER},
    "asks": {**_CALL, "service": str},
    "answered": {"n": int},
    "error": {"n": int, "t": _NUMBER, "type": str, "message": str, "refused": bool},
}

FLOOD: dict[str, Any] = {
    "k": "raised",
    "type": "ValueError",
    "message": "more than 256 MiB are too much for one result",
    "frames": [],
    "refused": "",
    "peer_lost": False,
}
"""What is taken down for a rank that sends a line without an end."""


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
    for frame in message.get("frames", ()):
        if not _is_frame(frame):
            return None
    if message.get("via") is not None and not _is_frame(message["via"]):
        return None
    for key in _NUMBERS:
        for item in message.get(key) or ():
            if not isinstance(item, int):
                return None
    return message


def _has(message: dict[str, Any], fields: dict[str, Any]) -> bool:
    for name, kind in fields.items():  # a loop: this is done for every event
        if name not in message or not isinstance(message[name], kind):
            return False
    return True


def _is_frame(frame: object) -> bool:
    if not isinstance(frame, tuple | list) or len(frame) != 2:
        return False
    return isinstance(frame[0], str) and isinstance(frame[1], int)
