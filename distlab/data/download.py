"""Download a known image set, and check each file's bits before naming it."""

from __future__ import annotations

import contextlib
import http.client
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from distlab.data.idx import IdxError, read_idx
from distlab.data.idx_sets import NAMES, KnownSet, find_files

PATIENCE_S = 30.0  # without a byte
_MOST_BYTES = 64 << 20  # packed, they have 30 MiB in all
_PIECE = 1 << 16


class DownloadError(OSError):
    """No mirror had the right file; the message says what each of them did."""


def download(
    known: KnownSet,
    folder: Path,
    *,
    say: Callable[[str], None],
    patience_s: float = PATIENCE_S,
) -> None:
    """Download the four files of `known` into `folder`, unless they're already right.

    An address in the environment's DISTLAB_MIRROR replaces the known mirrors.

    Raises:
        DownloadError: no mirror had one of the files.
        OSError: we can't write to the folder.
    """
    own = os.environ.get("DISTLAB_MIRROR")
    mirrors = (own,) if own else known.mirrors
    for name in NAMES:
        target = folder / f"{name}.gz"
        if _is_right(folder, known, name):
            continue
        refusals = []
        for mirror in mirrors:
            say(f"fetching {name}.gz from {_host(mirror)}")
            why = _fetch(mirror, target, known, patience_s)
            if not why:
                break
            refusals.append(f"{_host(mirror)}: {why}")
        else:
            raise DownloadError(
                f"{known.title} could not be downloaded: {name}.gz: "
                f"{'; '.join(refusals)}; if you have the four files, use "
                "--data-dir FOLDER"
            )


def _is_right(folder: Path, known: KnownSet, name: str) -> bool:
    try:
        path = find_files(folder)[name]
    except IdxError:  # not all four are there: this one may be
        path = folder / f"{name}.gz"
    return not _wrong(path, known, name)


def _wrong(path: Path, known: KnownSet, name: str) -> str:
    """Say what is wrong with a file, or return nothing."""
    try:
        read_idx(path, 3 if "images" in name else 1, sha256=known.sha256[name])
    except IdxError as error:
        return str(error).removeprefix(f"{path} ")
    return ""


def _fetch(mirror: str, target: Path, known: KnownSet, patience_s: float) -> str:
    """Fetch one file; why it could not be, or nothing.

    Under another name until it is whole and right: who looks meanwhile, or after a
    Ctrl-C, finds no half file.
    """
    is_new = not target.parent.exists()
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".unfinished-", dir=target.parent)
    unfinished = Path(name)
    try:
        with open(handle, "wb") as file:
            why = _copy(f"{mirror.rstrip('/')}/{target.name}", file.write, patience_s)
        if not why:
            why = _wrong(unfinished, known, target.name.removesuffix(".gz"))
        if not why:
            unfinished.chmod(0o644)
            os.replace(unfinished, target)
        return why
    finally:
        unfinished.unlink(missing_ok=True)
        if is_new:
            with contextlib.suppress(OSError):  # it is not empty
                target.parent.rmdir()


def _copy(address: str, write: Callable[[bytes], object], patience_s: float) -> str:
    if urlsplit(address).scheme not in ("http", "https"):
        return "the address of a mirror must begin with http:// or https://"
    try:
        with urllib.request.urlopen(address, timeout=patience_s) as answer:
            promised = answer.headers.get("Content-Length")
            length = 0
            while piece := answer.read(_PIECE):
                length += len(piece)
                if length > _MOST_BYTES:
                    return "it sends far more than such a file contains"
                write(piece)
    except urllib.error.HTTPError as error:
        return f"it answered {error.code} {error.reason}"
    except urllib.error.URLError as error:
        return f"it cannot be reached: {_reason(error.reason)}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"it broke off: {_reason(error)}"
    if promised and promised.isdecimal() and length != int(promised):
        return f"it broke off after {length:,} of {int(promised):,} bytes"
    return ""


def _reason(error: object) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _host(mirror: str) -> str:
    return urlsplit(mirror).netloc or mirror
