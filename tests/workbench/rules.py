"""The rules that test_imports.py holds the repository to, as functions of its files.

The table stands in the project's design as floors: a package imports from its own floor
or from below, and never in a circle. Everything is read from the syntax tree, so an
import inside a function counts as much as one at the top.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.workbench.unsaid import tree_of, unsaid_rules

ROOT = Path(__file__).parents[2]
FLOORS = {
    "comm": 1, "data": 1, "models": 1, "paths": 1, "terminal": 1, "install": 1,
    "set_up": 2,
    "search_order": 1, "cost": 1, "given": 1, "saved_tensors": 1, "recipe": 1,
    "checkpoints": 1, "seeds": 1,
    "dtensors": 1, "dcp": 1, "digests": 1, "attached": 1, "recorder": 1,
    "processes": 1, "registry": 1, "transports": 1,
    "sim": 2, "runner": 2, "launch": 2, "flight": 2, "curriculum": 2, "monitor": 2,
    "trace": 2, "ranks": 2, "grading": 3, "distributed": 3, "engines": 3,
    "run": 3, "audit": 3, "pytest_plugin": 3, "simulated": 3, "training": 3,
    "plan": 3,
    "walkthroughs": 4,
    "tutor": 4, "chaos": 4,
    "cli": 5,
    "__main__": 6,
}  # fmt: skip
CAPSTONE = "solutions/phase4_production/imagenet_trainer.py"
SOLUTIONS_MAY = {
    "distlab.comm", "distlab.given", "distlab.data", "distlab.checkpoints",
    "distlab.seeds",
}  # fmt: skip
CAPSTONE_MAY = SOLUTIONS_MAY | {
    "distlab.distributed", "distlab.models", "distlab.recipe", "distlab.monitor",
}  # fmt: skip
CHECKS = "distlab/grading/checks/"
WORD = re.compile(r"\w+")
Files = dict[str, str]
"""The texts of Python files by their path in the repository."""


@functools.cache
def repository() -> Files:
    folders = ("distlab", "solutions", "tests", "benchmarks", "figures")
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def imports(files: Files, prefix: str) -> Iterator[tuple[str, str]]:
    """(file, absolute name of what it imports) for all files below `prefix`."""
    for path, text in files.items():
        if path.startswith(prefix):
            for name in imported_in(path, text):
                yield path, name


@functools.cache
def imported_in(path: str, text: str) -> tuple[str, ...]:
    nodes = statements(tree_of(path, text))
    return tuple(name for node in nodes for name in imported_names(path, node))


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Every statement: an import is one, so no expression need be looked into."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            todo += getattr(node, name, ())


def imported_names(path: str, node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    parents = path.removesuffix(".py").split("/")[: -node.level or None]
    base = [*parents, node.module] if node.level else [node.module]
    module = ".".join(filter(None, base))
    if module == "distlab":  # from distlab import comm
        return [f"distlab.{alias.name}" for alias in node.names]
    return [module]


def package(module_or_path: str) -> str:
    """`grading` for distlab.grading.grade and for distlab/grading/grade.py."""
    parts = module_or_path.removesuffix(".py").replace("/", ".").split(".")
    return parts[1] if len(parts) > 1 else ""


def within(name: str, *packages: str) -> bool:
    return any(name == known or name.startswith(f"{known}.") for known in packages)


# ── the rules: each gives its complaints ────────────────────────────────────────────


def comm_stands_alone(files: Files) -> list[str]:
    return [
        f"{path} imports {name}"
        for path, name in imports(files, "distlab/comm/")
        if within(name, "distlab", "solutions") and not within(name, "distlab.comm")
    ]


def no_import_upward(files: Files) -> list[str]:
    found = []
    for path, name in imports(files, "distlab/"):
        own, other = package(path), package(name)
        if not within(name, "distlab") or not other or own == "__init__":
            continue
        if own not in FLOORS or (other not in FLOORS and other != "__version__"):
            found.append(f"{path}: {own} or {other} has no floor yet")
        elif FLOORS.get(other, 0) > FLOORS[own]:
            found.append(f"{path} (floor {FLOORS[own]}) imports {name} from above")
    return found


def no_circles_between_packages(files: Files) -> list[str]:
    reached: dict[str, set[str]] = defaultdict(set)
    for path, name in imports(files, "distlab/"):
        own, other = package(path), package(name)
        if within(name, "distlab") and other and own != other:
            reached[own].add(other)
    return in_circles(reached)


def no_circles_between_files(files: Files) -> list[str]:
    """Faces of packages aside: they hand on what stands below them."""
    modules = {
        path.removesuffix(".py").replace("/", "."): path
        for path in files
        if path.startswith("distlab/") and not path.endswith("__init__.py")
    }
    reached: dict[str, set[str]] = defaultdict(set)
    for path, name in imports(files, "distlab/"):
        if name in modules and path in modules.values():
            reached[path].add(modules[name])
    return in_circles(reached)


def in_circles(reached: dict[str, set[str]]) -> list[str]:
    while True:  # further and further, until nothing new can be reached
        before = sum(map(len, reached.values()))
        for own in list(reached):
            near = [reached[other] for other in reached[own] if other in reached]
            reached[own] = reached[own].union(*near)
        if sum(map(len, reached.values())) == before:
            break
    return [
        f"{own} imports itself by way of others"
        for own in reached
        if own in reached[own]
    ]


def nobody_imports_learners_code(files: Files) -> list[str]:
    # The one door is curriculum.load, which reads files and imports none.
    return [
        f"{path} imports {name}"
        for folder in ("distlab/", "solutions/")
        for path, name in imports(files, folder)
        if within(name, "solutions") or name.startswith("phase")
    ]


def solutions_see_comm_only(files: Files) -> list[str]:
    found = []
    for path, name in imports(files, "solutions/"):
        may = CAPSTONE_MAY if path == CAPSTONE else SOLUTIONS_MAY
        if within(name, "distlab") and not within(name, *may):
            found.append(f"{path} imports {name}")
    return found


def benchmarks_do_without_tests(files: Files) -> list[str]:
    """Tests try the benchmarks, so the two share only the corpora and the browser."""
    return [
        f"{path} imports {name}"
        for path, name in imports(files, "benchmarks/")
        if within(name, "tests") and not within(name, "tests.corpora", "tests.browser")
    ]


def corpora_stand_alone(files: Files) -> list[str]:
    """Tests and benchmarks import the corpora, never the other way around."""
    return [
        f"{path} imports {name}"
        for path, name in imports(files, "tests/corpora/")
        if within(name, "benchmarks", "tests") and not within(name, "tests.corpora")
    ]


def checks_do_without_pytest(files: Files) -> list[str]:
    return [
        f"{path} imports {name}"
        for path, name in imports(files, "distlab/")
        if within(name, "pytest", "_pytest") and package(path) != "pytest_plugin"
    ]


def checks_of_units_stand_apart(files: Files) -> list[str]:
    """What several use is in kit/: a unit's stamp is a digest of its own folder."""
    return [
        f"{path} imports {name}"
        for path, name in imports(files, CHECKS)
        if within(name, "distlab.grading.checks")
        and name.split(".")[3:4] not in ([], [path.removeprefix(CHECKS).split("/")[0]])
    ]


def fronts_are_thin(files: Files) -> list[str]:
    return [
        f"{path} imports {name}"
        for path, name in imports(files, "tests/test_phase")
        if within(name, "distlab", "solutions") and not within(name, "distlab.grading")
    ]


def definitions_are_used(files: Files) -> list[str]:
    """By name, anywhere; notebooks count, and what is decorated is registered."""
    notebooks = [path.read_text("utf-8") for path in ROOT.glob("phase*/*.ipynb")]
    mentions = Counter(
        word for text in (*files.values(), *notebooks) for word in WORD.findall(text)
    )
    return [
        f"{path}: nothing mentions {name}"
        for path, text in files.items()
        if path.startswith("distlab/")
        for node in tree_of(path, text).body
        if not getattr(node, "decorator_list", [])
        for name in definitions(node)
        if mentions[name] == 1 and not name.startswith("__")
    ]


def definitions(node: ast.stmt) -> set[str]:
    """What a statement of a module defines there; imports and loops aside."""
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.FunctionDef | ast.ClassDef):
        return defined_by(node)
    return set()


def exports_exist(files: Files) -> list[str]:
    found = []
    for path, text in files.items():
        if "__all__" not in text:
            continue
        tree = tree_of(path, text)
        named = next(filter(None, map(exported, tree.body)), [])
        defined = {name for node in tree.body for name in defined_by(node)}
        if "__getattr__" in defined:  # it makes names up: ask it
            module = path.removesuffix(".py").removesuffix("/__init__")
            real = importlib.import_module(module.replace("/", "."))
            defined |= {name for name in named if hasattr(real, name)}
        found += [f"{path}: __all__ names {n}" for n in named if n not in defined]
        found += [
            f"{path}: __all__ names {n} twice" for n in named if named.count(n) > 1
        ]
    return found


def exported(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == "__all__"
        for target in node.targets
    ):
        return list(ast.literal_eval(node.value))
    return []


def defined_by(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    return {
        inner.id
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
    }


Rule = Callable[[Files], list[str]]
RULES: list[Rule] = [
    comm_stands_alone,
    no_import_upward,
    no_circles_between_packages,
    no_circles_between_files,
    benchmarks_do_without_tests,
    corpora_stand_alone,
    nobody_imports_learners_code,
    solutions_see_comm_only,
    checks_do_without_pytest,
    checks_of_units_stand_apart,
    fronts_are_thin,
    definitions_are_used,
    exports_exist,
    unsaid_rules,
]
