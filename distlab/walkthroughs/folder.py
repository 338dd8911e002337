"""A course for a notebook that was opened on its own, in Colab for example."""

from __future__ import annotations

import os
from pathlib import Path

from distlab.curriculum import BUNDLED, find_root
from distlab.curriculum.fetched import fetch_here
from distlab.paths import shown

COLAB = Path("/content")
FOLDER = "distlab-course"


def enter_course(colab: Path = COLAB) -> None:
    """Go to the learner's course, and copy it out of the wheel the first time.

    In a course, such as a clone, this does nothing. Colab deletes its disk after a
    session, so the course goes to your Drive if you have mounted it.

    Raises:
        CurriculumError: the course can't be written.
    """
    if find_root() != BUNDLED:
        return
    drive = colab / "drive" / "MyDrive"
    above = next((place for place in (drive, colab) if place.is_dir()), Path.cwd())
    folder = above / FOLDER
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    fetched = fetch_here()
    print(f"the course {'is now' if fetched else 'was already'} in {folder}")
    template = sorted(folder.glob("phase1_*/template_collectives.py"))[0]
    print(f"write your code in {shown(template)}, and then run: !distlab check 1.1")
    if above == colab:
        print("this machine will be deleted: mount your Drive first to keep your files")
