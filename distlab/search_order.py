"""Where modules are looked for: what lies in the working folder comes last.

Python itself looks there first (`python -m`), so that a random.py or a torch.py of the
learner's would stand in for the library's, in distlab's own code too. Being last is not
enough for libraries that try to import what may not be installed: torch asks for
`cuda`. So an import statement of a library never finds a file of these folders.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # nothing may be imported before the order is right
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

OURS = ("distlab", "tests", "benchmarks", "figures")
"""What these folders may have for distlab's own code."""

_TESTERS = ("_pytest", "pluggy")  # they import what they were told to


def put_last(*folders: str) -> None:
    """Look for modules in `folders` and in the working folder after everywhere else."""
    last = {os.path.realpath(folder) for folder in (*folders, os.curdir)}
    behind = [path for path in sys.path if os.path.realpath(path) in last]
    sys.path[:] = [path for path in sys.path if path not in behind]
    own = [*dict.fromkeys(map(os.path.realpath, (*behind, *folders)))]
    sys.path += own
    hidden = next((f for f in sys.meta_path if isinstance(f, _NotForLibraries)), None)
    if hidden is None:
        hidden = _NotForLibraries()
        sys.meta_path.insert(0, hidden)
    hidden.folders = own


class _NotForLibraries:
    """A finder that only refuses: it finds nothing itself."""

    def __init__(self) -> None:
        from importlib.machinery import PathFinder
        from opcode import opmap

        self.folders: list[str] = []
        self._find, self._import = PathFinder.find_spec, opmap["IMPORT_NAME"]
        package = os.path.dirname(os.path.abspath(__file__))
        self._library = tuple(
            os.path.realpath(folder) + os.sep
            for folder in (package, os.path.dirname(os.__file__))
        )

    def find_spec(self, name: str, path: Any = None, _target: Any = None) -> Any:
        """Nothing, so that the other finders look for it.

        Raises:
            ModuleNotFoundError: only one of the folders has it, and a library asks.
        """
        if path is not None or name in OURS or not self._find(name, self.folders):
            return None
        elsewhere = [p for p in sys.path if os.path.realpath(p) not in self.folders]
        if self._find(name, elsewhere) or not self._is_asked_by_a_library():
            return None
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    def _is_asked_by_a_library(self) -> bool:
        """Whether an import statement asks, or import_module and the like, in one."""
        frame: FrameType | None = sys._getframe(2)
        while frame and _name(frame).split(".")[0] in (
            "importlib",
            "_frozen_importlib",
        ):
            frame = frame.f_back
        if frame is None:
            return False
        file = os.path.realpath(frame.f_code.co_filename)
        if "site-packages" in file or "dist-packages" in file:
            return _name(frame).split(".")[0] not in _TESTERS
        # Modules whose names distlab and Python are given, as in a pickle, are found.
        is_statement = frame.f_code.co_code[frame.f_lasti] == self._import
        return is_statement and file.startswith(self._library)


def _name(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__") or ""
    return "importlib" if frame.f_code.co_filename.startswith("<frozen") else str(name)
