"""What each rank's process has to itself, in a process that all ranks share.

A script changes more of its process than its variables: it imports modules that keep
state, edits `sys.argv`, changes the folder, sets up logging, draws random numbers. On
real ranks none of that is seen elsewhere. Here it is put aside whenever a rank stops,
and put back when the rank goes on:

    modules      those of the user, `__main__` among them, are loaded once per rank;
                 libraries are shared, except for those that are named in `own`
    sys          argv and path
    folder       `os.chdir` on one rank moves that rank
    logging      the root logger's handlers and level, and loggers made by the script
    numbers      the generators of torch, `random` and NumPy, as in a new process

A module is the user's if it is Python source outside of the folders where libraries are
installed. A finder in front of the others (`UsersModules`) notes their names, because
to look through all of sys.modules at each switch would take longer than the switch.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Collection, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import Any

from distlab.attached import found_by_others
from distlab.paths import is_users_code
from distlab.sim.generators import (
    Generators,
    OneGenerator,
    SeveralGenerators,
    numpys,
    pythons,
    torchs,
)

STATEFUL = ("hydra", "distlab.distributed", "distlab.engines")
"""Libraries known to keep one state per process that a script changes."""

_bootstrap: Any = importlib._bootstrap
_locks: dict[str, Any] = _bootstrap._module_locks
_manager: Any = logging.Logger.manager


class OwnProcess:
    """What one rank finds in the process when it goes on."""

    def __init__(self, argv: list[str], path: list[str], folder: str) -> None:
        self.argv, self.path, self.folder = argv, path, folder
        self.modules: dict[str, ModuleType] = {}
        self.locks: dict[str, Any] = {}
        self.handlers: list[logging.Handler] = []
        self.level = logging.WARNING
        self.loggers = dict(_manager.loggerDict)
        self.enabled: dict[int, bool] = {}  # levels of the root logger


class Process:
    """The parts of this process that are swapped, as `Generators` are."""

    word: Any = None
    seen_word = -1
    anyone_drew = True

    def __init__(
        self, argv: Sequence[str], path: Sequence[str], users: UsersModules
    ) -> None:
        self._argv, self._path = list(argv), list(path)
        self._folder = self._start_folder = os.getcwd()
        self._finder, self._names = users, users.names
        self._outside: OwnProcess | None = None  # what was there before the run

    def own(self, seed: int) -> OwnProcess:
        """See `Generators.own`."""
        return OwnProcess(list(self._argv), list(self._path), self._start_folder)

    def begin(self, own: OwnProcess) -> None:
        """See `Generators.begin`."""
        if self._outside is None:
            self._outside = OwnProcess(sys.argv, sys.path, self._folder)
            self.take(self._outside)
            loaded = [name for name in sys.modules if self._finder.is_own(name)]
            self._outside.modules |= _taken(sys.modules, loaded)
            sys.meta_path.insert(0, self._finder)
        self.put(own)

    def put(self, own: OwnProcess) -> None:
        """See `Generators.put`."""
        sys.argv, sys.path = own.argv, own.path
        sys.modules.update(own.modules)
        for package, name in self._finder.parts:
            if (part := own.modules.get(f"{package}.{name}")) is not None:
                setattr(sys.modules[package], name, part)
        _locks.update(own.locks)
        _put_logging(own)
        if own.folder != self._folder:
            os.chdir(own.folder)
            self._folder = own.folder

    def take(self, own: OwnProcess) -> None:
        """See `Generators.take`."""
        own.argv, own.path = sys.argv, sys.path
        root: Any = logging.root
        own.handlers, own.level, own.enabled = root.handlers, root.level, root._cache
        own.loggers = _manager.loggerDict
        own.folder = self._folder = os.getcwd()
        own.modules = _taken(sys.modules, self._names)
        # Another rank must not wait for a module that this one is still importing.
        own.locks = _taken(_locks, self._names)

    def restore(self) -> None:
        """See `Generators.restore`."""
        if self._outside is not None:
            sys.meta_path.remove(self._finder)
            _taken(sys.modules, self._names)
            self.put(self._outside)


def _taken(where: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The entries of those names, which are no longer there."""
    return {name: where.pop(name) for name in names if name in where}


def _put_logging(own: OwnProcess) -> None:
    root: Any = logging.root
    root.handlers, root.level, root._cache = own.handlers, own.level, own.enabled
    _manager.loggerDict = own.loggers


class UsersModules:
    """Finds what the other finders find, and notes which of it is the user's."""

    def __init__(self, own: Collection[str]) -> None:
        self.names = {"__main__": None}
        self.own = own
        # Of a package that is shared: what it holds of those is an attribute of it.
        self.parts = [name.rpartition(".")[::2] for name in own if "." in name]

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        spec = found_by_others(self, name, path, target)
        if spec is not None and (self.is_own(name) or _is_users(spec)):
            self.names[name] = None
        return spec

    def is_own(self, name: str) -> bool:
        """Whether a module is, or is in, one that every rank loads for itself."""
        return any(name == own or name.startswith(f"{own}.") for own in self.own)


def _is_users(spec: ModuleSpec) -> bool:
    """Whether it is Python source, or a folder of it, outside of the libraries."""
    if spec.origin is None:  # a folder without __init__.py
        places = list(spec.submodule_search_locations or ())
    elif isinstance(spec.loader, SourceFileLoader):
        places = [spec.origin]
    else:
        return False
    return bool(places) and all(is_users_code(place) for place in places)


def own_process(
    argv: Sequence[str], path: Sequence[str], users: UsersModules
) -> Generators:
    """All that a rank that runs a script has to itself.

    Where a new process seeds its generators from the system, a rank begins with the
    run's seed + rank.
    """
    sources = (torchs(), pythons(), numpys())
    numbers = [OneGenerator(source, lazy=False) for source in sources]
    return SeveralGenerators([*numbers, Process(argv, path, users)])
