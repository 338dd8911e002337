"""Write and read folders in the format of torch.distributed.checkpoint, in one process.

    nested dicts ─▶ write ─▶ a folder with .metadata and *.distcp ─▶ read ─▶ the same

`.metadata` is a pickle, and so is each value that isn't a tensor, and torch would run
any code that someone has put in there. We only build the types that belong there. torch
also doesn't verify the checksums of the values, so we do.

Source: docs.pytorch.org/docs/stable/distributed.checkpoint.html.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

METADATA = ".metadata"
TEMPORARY = ".tmp"

State = dict[str, Any]
"""Nested dicts and lists of tensors and plain values."""


class DcpError(ValueError):
    """Raised if a folder can't be written or read; one line says why."""


def is_dcp(folder: str | Path) -> bool:
    """Return True if torch.distributed.checkpoint has completed a save in `folder`."""
    return (Path(folder) / METADATA).is_file()


# ── writing ─────────────────────────────────────────────────────────────────────────


def write(folder: Path, state: State, *, replaces: bool = False) -> Path:
    """Write `state` into a new folder, which appears under its name when complete.

    With `replaces`, a DCP folder of that name is replaced. Returns `folder`.

    Raises:
        DcpError: there is a folder or file of that name, it can't be written, or a
            value in `state` couldn't be read back.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    if os.path.lexists(folder) and not (replaces and is_dcp(folder)):
        raise DcpError(f"{folder} exists already: name another folder")
    new = folder.with_name(f"{folder.name}.{os.getpid()}{TEMPORARY}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _without_warnings():
            save(state, checkpoint_id=new, no_dist=True)
        read(new)
        _put_in_place(new, folder)
    except DcpError as error:
        why = str(error).removeprefix(f"{new}: ")
        raise DcpError(f"{folder} could not be read back: {why}") from error
    except OSError as error:
        why = error.strerror or str(error)
        raise DcpError(f"{folder} cannot be written: {why}") from error
    except (Exception, CheckpointException) as error:
        why = _one_line(_cause(error))
        raise DcpError(f"{folder} cannot be written: {why}") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return folder


def _put_in_place(new: Path, folder: Path) -> None:
    sync_folder(new)
    old = new.with_suffix(f".old{TEMPORARY}")
    if os.path.lexists(folder):
        folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        with suppress(OSError):
            old.rename(folder)
        raise
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Write to disk which files a folder has."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Don't let torch tell us that there is only one process, which we know."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ── reading ─────────────────────────────────────────────────────────────────────────


def read(folder: Path, part: str | None = None) -> State:
    """Read everything in a DCP folder, unsharded and onto the CPU.

    With `part`, only what is below this key is read, and verified.

    Raises:
        DcpError: the folder isn't one of DCP's, is damaged, or contains anything other
            than tensors and plain data.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    if not is_dcp(folder):
        raise DcpError(f"{folder}: {_why_not(folder)}")
    try:
        return _read(folder, part)
    except DcpError as error:
        raise DcpError(f"{folder}: {error}") from error
    except FileNotFoundError as error:
        name = Path(error.filename or "a file").name
        raise DcpError(f"{folder}: it is damaged: {name} is missing") from error
    except OSError as error:
        why = error.strerror or str(error)
        raise DcpError(f"{folder} cannot be read: {why}") from error
    except (Exception, CheckpointException) as error:
        cause = _cause(error)
        why = _one_line(cause)
        if not isinstance(cause, DcpError):
            why = f"it is damaged: {why}"
        raise DcpError(f"{folder}: {why}") from error


def _why_not(folder: Path) -> str:
    if not os.path.lexists(folder):
        return "there is no such folder"
    if not folder.is_dir():
        return "this is a file; a DCP checkpoint is a folder"
    if any(folder.glob("*.distcp")):
        return f"it has no {METADATA}, so the save was cut short, or the copy was"
    return f"this is no DCP checkpoint, because it has no {METADATA}"


def _read(folder: Path, part: str | None) -> State:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    class Reader(FileSystemReader):
        """Reads the metadata without running code that is in it."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata

    class Planner(DefaultLoadPlanner):
        """Keeps all values that aren't tensors."""

        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            key = read_item.dest_index.fqn
            try:
                flat[key] = torch.load(value, "cpu", weights_only=True)
            except pickle.UnpicklingError as error:
                raise DcpError(f"{key!r} is not plain data") from error

    metadata = _metadata(folder / METADATA)
    paths = metadata.planner_data or {}
    kinds = {
        key: kind
        for key, kind in metadata.state_dict_metadata.items()
        if part in (None, paths.get(key, (key,))[0])
    }
    _verify(folder, metadata, kinds)
    flat: State = {}
    wanted: State = {}
    for key, kind in kinds.items():
        wanted[key] = None
        if isinstance(kind, TensorStorageMetadata):
            wanted[key] = torch.empty(kind.size, dtype=kind.properties.dtype)
    if wanted:
        with _without_warnings():
            load(wanted, storage_reader=Reader(folder), planner=Planner(), no_dist=True)
    flat = {**wanted, **flat}
    nested: State = {}
    for key in kinds:
        _put(nested, paths.get(key, (key,)), flat[key])
    return nested


def _verify(folder: Path, metadata: Any, keys: Container[str]) -> None:
    """Verify the checksum of each value that torch.save has written as an archive."""
    for index, place in metadata.storage_data.items():
        if index.fqn not in keys:
            continue
        with (folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
        if len(data) != place.length:
            raise DcpError(f"it is damaged: {place.relative_path} is too short")
        if getattr(place, "transform_descriptors", None):
            continue  # compressed, for example, so these aren't torch.save's bytes
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                changed = archive.testzip()
        except zipfile.BadZipFile:
            changed = index.fqn
        if changed:
            raise DcpError(
                f"it is damaged: the bytes of {index.fqn!r} in {place.relative_path} "
                "are not those that were saved"
            )


def _put(nested: State, path: tuple[str | int, ...], value: Any) -> None:
    """Set the value at a path of keys (str) and places in lists (int)."""
    here: Any = nested
    for key, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(key, int):
            here += [None] * (key + 1 - len(here))
        if following is None:
            here[key] = value
            return
        inner = here.get(key) if isinstance(here, dict) else here[key]
        if inner is None:
            inner = here[key] = [] if isinstance(following, int) else {}
        here = inner


def _cause(error: BaseException) -> BaseException:
    """Return the error that torch has wrapped, which may be one of several ranks."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, Mapping) and failures:
        found: BaseException = next(iter(failures.values()))[0]
        return found
    return error


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, DcpError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# ── the metadata ────────────────────────────────────────────────────────────────────

_OURS = "torch.distributed.checkpoint."
_MAY_BE_THERE = {
    f"{_OURS}metadata": {
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "BytesStorageMetadata",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_OURS}filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
}
"""Types in the metadata that torch's FileSystemWriter saves; some are private."""
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path")


class _Unpickler(pickle.Unpickler):
    """Builds the types of DCP's metadata, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a type by its name.

        Raises:
            DcpError: it doesn't belong in a checkpoint's metadata.
        """
        if name in _MAY_BE_THERE.get(module, ()):
            return super().find_class(module, name)
        if module.split(".")[0] == "pathlib" and name in _PATHS:
            return Path  # where it was saved; we don't look there
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise DcpError(
            f"its {METADATA} is a pickle with {module}.{name}, which could run any "
            "code: it is not opened"
        )


def _metadata(path: Path) -> Any:
    from torch.distributed.checkpoint.metadata import Metadata

    with path.open("rb") as file:
        try:
            found = _Unpickler(file).load()
        except DcpError:
            raise
        except Exception as error:
            raise DcpError(f"its {METADATA} is damaged") from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise DcpError(f"its {METADATA} is damaged")
    if found.storage_meta is None:
        from torch.distributed.checkpoint.metadata import StorageMeta

        found.storage_meta = StorageMeta()
    return found
