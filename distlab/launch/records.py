"""What torch's @record notes of an exception: a file for each rank, one for the agent.

    TORCHELASTIC_ERROR_FILE of a rank     set by the agent; @record writes it
    TORCHELASTIC_ERROR_FILE of the agent  set by a scheduler; the agent copies the
                                          record of the rank that failed first

Source: torch/distributed/elastic/multiprocessing/errors/error_handler.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_MOST_BYTES = 1 << 16


def read_record(path: Path) -> dict[str, Any]:
    """What a rank has noted; empty if it has noted nothing that can be read."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8")[:_MOST_BYTES])
        if isinstance(found, dict):
            return found
    return {}


def message(record: Mapping[str, Any]) -> str:
    """Its first line, such as `ValueError: no data`."""
    inner = record.get("message", "")
    text = inner.get("message", "") if isinstance(inner, dict) else inner
    return str(text).partition("\n")[0]


def timestamp(record: Mapping[str, Any]) -> float:
    """When it was written; inf if it doesn't say."""
    inner = record.get("message", {})
    extra = inner.get("extraInfo", {}) if isinstance(inner, dict) else {}
    try:
        return float(extra["timestamp"])
    except (KeyError, TypeError, ValueError):
        return float("inf")


def write_error_file(given: Mapping[str, Any], what: str, code: int) -> None:
    """Tell whoever started the agent why the job failed, if a file is named.

    That is the record of the rank that failed, or without one, `what` happened.
    """
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    record = dict(given)
    inner = record.get("message")
    if isinstance(inner, dict):
        record["message"] = {**inner, "errorCode": code}
    elif not record:
        extra = {"timestamp": str(int(time.time()))}
        text = {"message": what, "errorCode": code, "extraInfo": extra}
        record["message"] = text
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps(record), encoding="utf-8")
