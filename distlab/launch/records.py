"""Read and write the error files in which torch's @record describes an exception.

    TORCHELASTIC_ERROR_FILE of a rank     set by the agent, written by @record
    TORCHELASTIC_ERROR_FILE of the agent  set by a scheduler; the agent copies in the
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
    """Read a rank's error file; return an empty dict if there is nothing readable."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8")[:_MOST_BYTES])
        if isinstance(found, dict):
            return found
    return {}


def message(record: Mapping[str, Any]) -> str:
    """Return the first line of the message, such as `ValueError: no data`."""
    inner = record.get("message", "")
    text = inner.get("message", "") if isinstance(inner, dict) else inner
    return str(text).partition("\n")[0]


def timestamp(record: Mapping[str, Any]) -> float:
    """Return when the record was written, or inf if it doesn't say."""
    inner = record.get("message", {})
    extra = inner.get("extraInfo", {}) if isinstance(inner, dict) else {}
    try:
        return float(extra["timestamp"])
    except (KeyError, TypeError, ValueError):
        return float("inf")


def write_error_file(given: Mapping[str, Any], what: str, code: int) -> None:
    """Tell the process that started the agent why the job failed, if it named a file.

    The file gets the record of the rank that failed. If that record is empty, the file
    gets `what`.
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
