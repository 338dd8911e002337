"""One loader for a unit's code, whoever wrote it; with holes filled by the reference.

The text is read once and travels with the job, so that every rank runs the very file
whose digest the verdict names, even if it is saved again in the meantime.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import hashlib
import stat
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Literal

from distlab.curriculum.manifest import Curriculum, Unit, load_curriculum
from distlab.curriculum.regions import functions_of
from distlab.paths import shown

MAX_BYTES = 1_000_000  # a unit has some ten thousand; Python parses 1 MB in seconds
TaskState = Literal["started", "not_started", "missing"]


class SourceError(ValueError):
    """A unit's file cannot be read or parsed. `line` is 0 when there is none."""

    def __init__(
        self, message: str, path: Path, line: int = 0, *, is_syntax: bool = False
    ) -> None:
        super().__init__(message)
        self.path, self.line, self.is_syntax = path, line, is_syntax


@contextlib.contextmanager
def naming_file(also: str = "") -> Iterator[None]:
    """Inside, a SourceError says which file it is of, and ends with `also`.

    For where nothing else names the file; a verdict shows the path by itself.
    """
    try:
        yield
    except SourceError as error:
        message = f"{shown(error.path)}: {error}{also}"
        raise SourceError(
            message, error.path, error.line, is_syntax=error.is_syntax
        ) from error


@dataclass(frozen=True)
class UnitSource:
    """The text of one unit: `side` is "mine", "reference" or "file"."""

    unit: str
    side: str
    path: Path
    text: str
    builds: str = ""  # see manifest.Unit

    @property
    def digest(self) -> str:
        """The first 12 hex digits of the text's SHA-256."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed text; not to be changed, every reader gets the same one.

        Raises:
            SourceError: it is not valid Python.
        """
        _ = self.code  # a `return` outside a function parses, but does not compile
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those that compiling has passed over
            return ast.parse(self.text, str(self.path))

    @property
    def given(self) -> tuple[str, ...]:
        """The modules of distlab that it imports first of all."""
        names: list[str] = []
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom) and node.module:
                names.append(node.module)
            elif isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
        return tuple(name for name in names if name.startswith("distlab."))

    @cached_property
    def code(self) -> CodeType:
        """The compiled text.

        Raises:
            SourceError: it is not valid Python.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "\d" in a docstring is no error
                # Without this file's own `from __future__`, as Python compiles it.
                return compile(self.text, str(self.path), "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise self._not_python(error) from error
        except (RecursionError, MemoryError) as error:
            raise SourceError(
                "an expression is nested too deeply for Python", self.path
            ) from error

    def _not_python(self, error: SyntaxError | ValueError) -> SourceError:
        if "\0" in self.text:  # what Python says about it differs between versions
            line = self.text[: self.text.index("\0")].count("\n") + 1
            problem = "a null byte"
        elif isinstance(error, SyntaxError):
            line, problem = error.lineno or 0, error.msg
        else:
            line, problem = 0, str(error)
        place = f"line {line}" if line else "the file"
        message = f"{place} is not Python: {problem}"
        return SourceError(message, self.path, line, is_syntax=True)

    def state_of(self, task_id: str, functions: Sequence[str]) -> tuple[TaskState, int]:
        """Whether a task was started, and the line of what tells.

        Not started means that one of its holes' own `raise` is still there.
        """
        nodes = [_find(self.tree.body, name.split(".")) for name in functions]
        if None in nodes:
            return "missing", 0
        found = [node for node in nodes if node]
        for node in found:
            for inner in ast.walk(node):
                if _is_hole(inner, task_id):
                    return "not_started", getattr(inner, "lineno", node.lineno)
        return "started", found[0].lineno

    def missing(self, functions: Sequence[str]) -> str:
        """The first of these functions that the file does not have; or nothing."""
        absent = (f for f in functions if not _find(self.tree.body, f.split(".")))
        return next(absent, "")

    def function_digest(self, functions: Sequence[str]) -> str:
        """A digest of the code: comments, docstrings and layout do not change it."""
        return _function_digest(self, tuple(functions))


@lru_cache(maxsize=256)
def _function_digest(source: UnitSource, functions: tuple[str, ...]) -> str:
    nodes = [_find(source.tree.body, name.split(".")) for name in functions]
    code = "".join(ast.dump(_without_docstring(node)) if node else "" for node in nodes)
    return hashlib.sha256(code.encode()).hexdigest()[:12]


def _without_docstring(node: ast.AST) -> ast.AST:
    """A copy of the function or class without its docstring, for the digest."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node
    if ast.get_docstring(node, clean=False) is None:
        return node
    bare = copy.copy(node)
    bare.body = node.body[1:]
    return bare


def travelling(source: UnitSource) -> dict[str, str]:
    """A unit's text as it travels to the ranks."""
    return {
        "unit": source.unit,
        "side": source.side,
        "path": str(source.path),
        "text": source.text,
        "builds": source.builds,
    }


def arrived(parts: dict[str, str]) -> UnitSource:
    """What `travelling` was given."""
    return UnitSource(
        parts["unit"],
        parts["side"],
        Path(parts["path"]),
        parts["text"],
        parts["builds"],
    )


def path_of(curriculum: Curriculum, unit: Unit, code: str = "mine") -> Path:
    """The file of a unit's text: `code` is "mine", "reference" or a path."""
    if code == "mine":
        return unit.template(curriculum.root)
    if code == "reference":
        return unit.solution(curriculum.root)
    return Path(code).resolve()


def read_source(curriculum: Curriculum, unit: Unit, code: str = "mine") -> UnitSource:
    """Read a unit's text: `code` is "mine", "reference" or a path.

    Raises:
        SourceError: the file cannot be read.
    """
    side = code if code in ("mine", "reference") else "file"
    path = path_of(curriculum, unit, code)
    try:
        expect_a_text_file(path)
        # -sig: an editor's byte-order mark is no part of the program
        text = path.read_text(encoding="utf-8-sig")
        return _remembered(unit.name, side, path, text, unit.builds)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise SourceError(f"the file cannot be read: {reason}", path) from error
    except UnicodeDecodeError as error:
        raise SourceError("the file is not UTF-8 text", path) from error


def units_in(curriculum: Curriculum, code: str) -> list[str]:
    """The units that a file is about: of which it has most of the tasks' functions.

    Raises:
        SourceError: the file cannot be read or parsed.
    """
    shares: dict[str, float] = {}
    for unit in curriculum.units.values():
        source = read_source(curriculum, unit, code)
        functions = functions_of(read_source(curriculum, unit, "reference").text)
        states = [source.state_of(task.id, functions[task.id]) for task in unit.tasks]
        present = [state for state, _ in states if state != "missing"]
        shares[unit.name] = len(present) / len(states)
    most = max(shares.values())
    return [unit for unit, share in shares.items() if share == most > 0]


# A text is looked at once for each of its tasks: parse and compile it only once. A look
# at all files, as at every save, takes templates and references in turn: room for both.
_remembered = lru_cache(maxsize=256)(UnitSource)


def expect_a_text_file(path: Path) -> None:
    """Look before reading.

    Raises:
        OSError: there is no such file.
        SourceError: it is a pipe, a device, or too large.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        # Reading a FIFO or a device may never end.
        raise SourceError("it is not a regular file", path)
    if status.st_size > MAX_BYTES:
        size = f"{status.st_size / 1e6:.1f} MB"
        raise SourceError(f"it is {size} large; 1 MB is the most", path)


def load(unit: str, side: str = "reference") -> ModuleType:
    """The module of a unit: `side` is "mine", "reference" or a path.

    Raises:
        SourceError: the file, which it names, cannot be read or parsed.
        CurriculumError: there is no such unit.
    """
    curriculum = load_curriculum()
    with naming_file():
        source = read_source(curriculum, curriculum.units[unit], side)
        _ = source.code
    return _execute(source)


def load_graft(
    source: UnitSource, reference: UnitSource, tasks: Iterable[str]
) -> ModuleType:
    """The module of `source`, with the functions of `tasks` taken from `reference`."""
    module = _execute(source)
    wanted = list(tasks)
    if not wanted:
        return module
    functions = functions_of(reference.text)
    donor = reference.tree
    names = {name for task in wanted for name in functions[task]}
    helpers = [
        node
        for node in donor.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and node.name not in sum(functions.values(), ())
        and not hasattr(module, node.name)
    ]
    grafts = [n for name in sorted(names) if (n := _find(donor.body, name.split(".")))]
    for node, name in [(h, h.name) for h in helpers] + list(
        zip(grafts, sorted(names), strict=True)
    ):
        _implant(module, node, name, reference)
    return module


def _execute(source: UnitSource) -> ModuleType:
    name = f"distlab_units.{source.side}.{source.unit}"
    for package in ("distlab_units", f"distlab_units.{source.side}"):
        sys.modules.setdefault(package, ModuleType(package))
    module = ModuleType(name)
    module.__file__ = str(source.path)
    sys.modules[name] = module
    exec(source.code, module.__dict__)
    return module


def _implant(
    module: ModuleType,
    node: ast.FunctionDef | ast.ClassDef,
    qualified: str,
    donor: UnitSource,
) -> None:
    flags = donor.code.co_flags & annotations.compiler_flag  # as in the donor's file
    tree, path = ast.Module([node], []), str(donor.path)
    code = compile(tree, path, "exec", flags=flags, dont_inherit=True)
    *holders, name = qualified.split(".")
    owner: object = module
    for holder in holders:
        owner = getattr(owner, holder)
    # A method, too, looks names up in the module: what is implanted later counts.
    scope = module.__dict__ if owner is module else {}
    exec(code, module.__dict__, scope)
    if owner is not module:
        setattr(owner, name, scope[name])


def _find(body: list[ast.stmt], names: list[str]) -> ast.FunctionDef | None:
    for node in reversed(body):  # of two definitions the later one counts
        if isinstance(node, ast.ClassDef) and node.name == names[0] and names[1:]:
            return _find(node.body, names[1:])
        if isinstance(node, ast.FunctionDef) and [node.name] == names:
            return node
    return None


def _is_hole(node: ast.AST, task_id: str) -> bool:
    if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
        return False
    call = node.exc
    is_right_error = (
        isinstance(call.func, ast.Name) and call.func.id == "NotImplementedError"
    )
    arguments = [a.value for a in call.args if isinstance(a, ast.Constant)]
    return is_right_error and arguments == [task_id]
