"""A table whose entries come from our own modules and from other packages.

    _table = Registry(
        "transport", "distlab.transports", "distlab.transports", "backend", ValueError
    )
    _table.add("gloo", entry, open_gloo)     in transports/torch_transport.py
    _table.find("gloo")

Our own entries live in files named *_<kind>.py in the table's package. We import these
files when somebody first asks for an entry. Another package declares one of its modules
as an entry point, and importing that module adds the package's entries:

    [project.entry-points."distlab.transports"]
    name = "package.module"

Looking up entry points takes a tenth of a second, so we do it only if an entry isn't
one of ours, or if somebody asks for all of them. An error in another package's module
is raised only if somebody asks for that package's entry.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

E = TypeVar("E")


class Registry(Generic[E]):
    """Maps names to entries of one `kind`; ours are defined in files in `package`.

    Other packages' entry points are in the group `group`. Looking up an unknown name
    raises `unknown`, with a message that begins with `label`, which is what users call
    this kind of entry.
    """

    def __init__(
        self,
        kind: str,
        package: str,
        group: str,
        label: str,
        unknown: type[Exception],
    ) -> None:
        self._kind, self._package, self._group = kind, package, group
        self._label, self._unknown = label, unknown
        self._table: dict[str, tuple[E, str]] = {}  # and the module that added it
        self._broken: dict[str, str] = {}
        self._has_ours = self._has_others = False

    def add(self, name: str, entry: E, factory: Any) -> None:
        """Add an entry that `factory`'s module registers.

        Raises:
            ValueError: another module has registered this name.
        """
        module = factory.__module__
        _, known = self._table.setdefault(name, (entry, module))
        if known != module:
            raise ValueError(
                f"{self._kind} {name} is registered by {known} and by {module}: give "
                "one of them another name"
            )

    def entries(self) -> list[E]:
        """Return all entries, in no particular order."""
        self._load_others()
        return [entry for entry, _ in self._table.values()]

    def find(self, name: str, known: Callable[[], Sequence[str]] | None = None) -> E:
        """Return the entry with this name.

        If there is none, the error message lists the names that `known` returns, or
        all names by default.

        Raises:
            Exception: of the type `unknown`, if there is no such entry or its package
                can't be imported.
        """
        self.load_ours()
        if name not in self._table:
            self._load_others()
        if name in self._broken:
            raise self._unknown(self._broken[name])
        if name not in self._table:
            listed = ", ".join(known() if known else sorted(self._table))
            raise self._unknown(f"{self._label} is {name!r}; there are {listed}")
        return self._table[name][0]

    def load_ours(self) -> None:
        """Import our own files."""
        if self._has_ours:
            return
        self._has_ours = True  # the files may ask for entries themselves
        folders = importlib.import_module(self._package).__path__
        for module in pkgutil.iter_modules(folders):
            if module.name.endswith(f"_{self._kind}"):
                importlib.import_module(f"{self._package}.{module.name}")

    def _load_others(self) -> None:
        self.load_ours()
        if not self._has_others:
            self._has_others = True
            for point in entry_points(group=self._group):
                self._load_other(point)

    def _load_other(self, point: EntryPoint) -> None:
        try:
            point.load()
        except Exception as error:  # other people's code may raise anything
            said = (str(error).splitlines() or [""])[0]
            self._broken[point.name] = (
                f"{self._label} {point.name} cannot be imported from {point.value}: "
                f"{type(error).__name__}: {said}"
            )
        else:
            if point.name not in self._table:
                self._broken[point.name] = (
                    f"{point.value} registers no {self._kind} {point.name!r}, though "
                    f"its entry point in {self._group} says so"
                )


def written_names(folder: Path, kind: str, group: str) -> list[str]:
    """Return the names of all entries without importing the modules that add them.

    Help needs only the names, and importing our modules takes seconds. We read our
    names from the calls of register_<kind> in `folder`. For another package, this is
    the name of its entry point.
    """
    names = [
        ast.literal_eval(call.args[0])
        for path in sorted(folder.glob(f"*_{kind}.py"))
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == f"register_{kind}"
    ]
    return sorted({*names, *(point.name for point in entry_points(group=group))})
