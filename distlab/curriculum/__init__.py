"""What the course consists of, and which code stands for it: yours or the reference."""

from distlab.curriculum.manifest import (
    BUNDLED,
    Curriculum,
    CurriculumError,
    Phase,
    Task,
    Unit,
    find_root,
    installed_course,
    load_curriculum,
)
from distlab.curriculum.progress import Progress, ProgressUnavailableError
from distlab.curriculum.regions import RegionError, make_template
from distlab.curriculum.units import (
    SourceError,
    UnitSource,
    load,
    load_graft,
    naming_file,
    path_of,
    read_source,
)

__all__ = [
    "BUNDLED",
    "Curriculum",
    "CurriculumError",
    "Phase",
    "Progress",
    "ProgressUnavailableError",
    "RegionError",
    "SourceError",
    "Task",
    "Unit",
    "UnitSource",
    "find_root",
    "installed_course",
    "load",
    "load_curriculum",
    "load_graft",
    "make_template",
    "naming_file",
    "path_of",
    "read_source",
]
