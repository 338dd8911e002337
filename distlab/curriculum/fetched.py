"""The course that came in a wheel, and the copy of it in a learner's folder.

In a clone, the course and distlab lie side by side, and none of this is needed. With
`pip install distlab`, the course is in site-packages, where learners shouldn't edit it.
So `distlab start` copies it into an empty folder and generates the templates there, so
that the folder works as a clone does. It also notes the digest of each copied file in
`.distlab/course.json`. From these, `distlab update` can tell a file that the learner
has edited, such as a notebook, from one that is merely old: the first is kept beside
the new one, and the second is replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from distlab.curriculum.manifest import (
    BUNDLED,
    CurriculumError,
    find_root,
    installed_course,
    load_curriculum,
)
from distlab.curriculum.pristine import template_files, write_templates

RECORD = Path(".distlab") / "course.json"


@dataclass(frozen=True)
class Renewed:
    """What `renew` did: paths relative to the course's folder."""

    written: list[Path] = field(default_factory=list)
    kept: list[Path] = field(default_factory=list)  # what the learner had edited
    removed: list[Path] = field(default_factory=list)


def fetch_here() -> Path | None:
    """Copy the wheel's course into the working folder, unless we're in a course.

    Returns the folder, or nothing if there was nothing to do.

    Raises:
        CurriculumError: the folder has other files in it, or we can't write to it.
    """
    if find_root() != BUNDLED:
        return None
    folder = Path.cwd()
    others = sorted(path.name for path in folder.iterdir() if not _is_expected(path))
    if others:
        raise CurriculumError(
            f"the course needs a folder of its own, and this one contains {others[0]}: "
            "mkdir course && cd course && distlab start"
        )
    try:
        renew(folder)
    except OSError as error:
        raise CurriculumError(
            f"cannot copy the course to {folder}: {error.strerror}"
        ) from error
    return folder


def _is_expected(path: Path) -> bool:
    """Return True if this may lie beside the course: .git, say, or an environment."""
    return path.name.startswith(".") or (path / "pyvenv.cfg").is_file()


def renew(root: Path) -> Renewed:
    """Bring all files but the templates to the wheel's version, and add what's missing.

    Raises:
        OSError: a file can't be read or written.
    """
    known, result = _known(root), Renewed()
    digests = {}
    for source in sorted(path for path in BUNDLED.rglob("*") if _is_shipped(path)):
        name, content = source.relative_to(BUNDLED).as_posix(), source.read_bytes()
        digests[name] = _digest(content)
        _put(root / name, content, known.get(name), root, result)
    for name in sorted(set(known) - set(digests)):
        path = root / name
        if path.is_file() and _digest(path.read_bytes()) == known[name]:
            path.unlink()
            result.removed.append(Path(name))
    curriculum = load_curriculum(root)
    write_templates(
        curriculum, [f for f in template_files(curriculum) if f.state == "missing"]
    )
    record = {"version": installed_version(), "files": digests}
    (root / RECORD).parent.mkdir(exist_ok=True)
    (root / RECORD).write_text(json.dumps(record, indent=0), encoding="utf-8")
    return result


def is_fetched(root: Path) -> bool:
    """Return True if this course is a copy that the installed wheel can renew."""
    return (root / RECORD).is_file() and installed_course() == BUNDLED


def version_of(root: Path) -> str:
    """Return the version of distlab that this course is from; "" in a clone."""
    return str(_record(root).get("version", ""))


def installed_version() -> str:
    """Return the version of the installed distlab."""
    return importlib.metadata.version("distlab")


def keep_beside(path: Path) -> Path:
    """Copy the file to an unused name in the same folder."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    content = path.read_bytes()
    for number in itertools.count():
        name = f"{path.stem}.kept-{stamp}" + (f"-{number}" if number else "")
        kept = path.with_name(f"{name}{path.suffix}")
        with contextlib.suppress(FileExistsError), kept.open("xb") as file:
            file.write(content)
            break
    return kept


def replace_whole(path: Path, content: bytes) -> None:
    """Write a file such that an interruption leaves the old one or the new one."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_bytes(content)
    os.replace(beside, path)


def _put(
    path: Path, content: bytes, known: str | None, root: Path, result: Renewed
) -> None:
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
    else:
        if found == content:
            return
        if _digest(found) != known:
            result.kept.append(keep_beside(path).relative_to(root))
    replace_whole(path, content)
    result.written.append(path.relative_to(root))


def _is_shipped(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def _record(root: Path) -> Mapping[str, object]:
    try:
        found = json.loads((root / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _known(root: Path) -> dict[str, str]:
    files = _record(root).get("files")
    return files if isinstance(files, dict) else {}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
