"""The course of the folder that we're in, for verbs that need more than a wheel has."""

from __future__ import annotations

from distlab.cli.screen import command, warn
from distlab.curriculum import (
    BUNDLED,
    Curriculum,
    CurriculumError,
    installed_course,
    load_curriculum,
)
from distlab.curriculum.fetched import installed_version, version_of


def own_course(*, complain: bool = True) -> Curriculum:
    """Load the course of the folder that we're in, for verbs that need your files.

    If the course is from another version than distlab, it warns you, unless `complain`
    is false.

    Raises:
        CurriculumError: distlab came in a wheel, and this folder isn't a course.
    """
    curriculum = load_curriculum()
    if curriculum.root == BUNDLED:
        raise CurriculumError(
            "this folder isn't a course yet: run `distlab start` in an empty folder, "
            "and it copies the course there"
        )
    copied = version_of(curriculum.root)
    if complain and copied and copied != (installed := installed_version()):
        warn(
            f"this course is from distlab {copied}, but you have installed "
            f"{installed}; run `{command('update')}`, which keeps your code"
        )
    return curriculum


def need_a_clone(verb: str) -> None:
    """Make sure that we run in a clone, which has more than a wheel.

    Raises:
        CurriculumError: distlab was installed from a wheel.
    """
    if installed_course() == BUNDLED:
        raise CurriculumError(
            f"`distlab {verb}` needs a clone of distlab's repository; a package that "
            "pip has installed doesn't contain the files"
        )
