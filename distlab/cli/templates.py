"""`distlab templates`: generate the holes from the solutions."""

from __future__ import annotations

from distlab.cli.screen import show, warn
from distlab.curriculum import load_curriculum
from distlab.curriculum.pristine import reworded, template_files, write_templates
from distlab.paths import shown


def templates(*, check_only: bool = False) -> int:
    """Write the templates, or only compare them; return 1 if something is wrong.

    Raises:
        RegionError: a solution's markers are wrong.
    """
    curriculum = load_curriculum()
    stale = reworded(curriculum)
    for path, text in stale.items():
        if check_only:
            warn(f"{shown(path)} differs from curriculum.toml; run make templates")
        else:
            path.write_text(text, encoding="utf-8")
    files = template_files(curriculum)
    if check_only:
        off = [file for file in files if file.state != "current"]
        for file in off:
            warn(f"{shown(file.path)} is {file.state}; run make templates")
        return 1 if off or stale else 0
    write_templates(curriculum, files)
    edited = [file for file in files if file.state == "edited"]
    for file in edited:
        warn(f"we left {shown(file.path)} alone because somebody has edited it")
    show([("plain", f"{len(files) - len(edited)} templates are up to date")])
    return 1 if edited else 0
