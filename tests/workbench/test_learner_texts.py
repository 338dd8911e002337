"""What learners read leads somewhere: links, pictures, commands and slugs exist."""

import ast
import re
import threading
from pathlib import Path

import pytest
import torch

from distlab.comm import Comm
from distlab.curriculum import load_curriculum, make_template
from distlab.curriculum.hints import LEVELS, read_hints
from distlab.curriculum.manifest import Unit
from distlab.curriculum.misconceptions import fitting_hint, read_misconceptions
from distlab.curriculum.regions import find_regions

ROOT = Path(__file__).resolve().parents[2]
CURRICULUM = load_curriculum(ROOT)
PHASES = [phase.folder for phase in CURRICULUM.phases]
GUIDES = [
    path
    for folder in PHASES
    for path in (ROOT / folder / "guidelines.md", *(ROOT / folder).glob("guide/*.md"))
]

ROOM = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


@pytest.mark.parametrize("path", [*GUIDES, *ROOM], ids=lambda path: path.stem)
def test_links_lead_to_files_and_headings_that_exist(path: Path) -> None:
    for link in re.findall(r"!?\[[^\]]*\]\(([^)]+)\)", path.read_text("utf-8")):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        if anchor:
            text = target.read_text(encoding="utf-8")
            titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
            assert anchor in {anchor_of(title) for title in titles}, link


@pytest.mark.parametrize("folder", ["figures", *(f"{p}/figures" for p in PHASES)])
def test_the_smallest_type_of_a_picture_is_11_px_in_a_column_of_860(
    folder: str,
) -> None:
    for path in (ROOT / folder).glob("*.svg"):
        svg = path.read_text(encoding="utf-8")
        found = re.search(r'<svg [^>]*width="(\d+)"', svg)
        assert found, path
        scale = min(1.0, 860 / int(found[1]))
        sizes = map(float, re.findall(r'font-size="([\d.]+)"', svg))
        assert min(sizes) * scale >= 11, path


def test_every_picture_is_on_a_page_with_words_for_those_who_do_not_see_it() -> None:
    shown = {}
    for page in [*GUIDES, *ROOM]:
        found = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text("utf-8"))
        shown |= {(page.parent / link).resolve(): words for words, link in found}
    pictures = {path for folder in PHASES for path in (ROOT / folder).rglob("*.svg")}
    assert pictures <= set(shown)
    assert all(len(words) > 40 for words in shown.values())


def anchor_of(title: str) -> str:
    """The anchor that GitHub gives a heading."""
    kept = re.sub(r"[^\w\- ]", "", title.lower())
    return kept.replace(" ", "-")


def test_every_task_has_a_hint_of_each_level_and_a_heading_in_the_guide() -> None:
    for task in CURRICULUM.tasks:
        hints = read_hints(CURRICULUM, task)
        assert list(hints) == [*range(1, len(LEVELS) + 1)], task.id
        assert all(hints.values()), task.id
        folder = ROOT / CURRICULUM.units[task.unit].folder
        page = (folder / "guide" / f"{task.unit}.md").read_text(encoding="utf-8")
        assert f"\n### {task.number} {task.id}\n" in page


def test_the_hours_of_the_readme_are_those_of_the_time_tables() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) · .*\| (\d+) \((\d+)\) \|$", readme, re.MULTILINE)
    assert [int(number) for number, *_ in rows] == [p.number for p in CURRICULUM.phases]
    for (_, *hours), folder in zip(rows, PHASES, strict=True):
        guide = (ROOT / folder / "guidelines.md").read_text(encoding="utf-8")
        minutes = {False: 0, True: 0}
        tasks = re.findall(
            r"^\| \d\.\d+ (.*)\| (\d+) \| (\d+) \|$", guide, re.MULTILINE
        )
        for what, keyboard, reading in tasks:
            minutes["(stretch)" in what] += int(keyboard) + int(reading)
        assert abs(int(hours[0]) - minutes[False] / 60) < 1, folder
        assert abs(int(hours[1]) - sum(minutes.values()) / 60) < 1, folder


@pytest.mark.parametrize("unit", CURRICULUM.units.values(), ids=lambda unit: unit.name)
def test_a_guide_page_opens_with_objectives_needs_and_minutes(unit: Unit) -> None:
    text = unit.guide(ROOT).read_text(encoding="utf-8")
    opening = text[text.index("\n## Objectives\n") : text.index("\n## Why\n")]
    assert len(re.findall(r"^- ", opening, flags=re.MULTILINE)) >= 3
    tasks = {task.id: task for task in CURRICULUM.tasks}
    needs = [tasks[name] for task in unit.tasks for name in task.needs]
    wanted = {task.number for task in needs if task.unit != unit.name}
    below = opening[opening.index("\nYou need ") :]
    assert set(re.findall(r"\b\d\.\d+\b", below)) == wanted
    core = sum(task.minutes for task in unit.tasks if not task.stretch)
    stretch = sum(task.minutes for task in unit.tasks if task.stretch)
    minutes = re.findall(r"(?:about|another)\s(\d+)", below)
    assert [int(number) for number in minutes] == [n for n in (core, stretch) if n]


def test_every_slug_that_a_guide_names_is_explained() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in GUIDES)
    named = set(re.findall(r"`\[([a-z0-9-]+)\]`", text))
    assert named
    assert named <= set(read_misconceptions())


def test_every_explanation_has_all_parts_and_a_hint_that_exists() -> None:
    for slug, entry in read_misconceptions().items():
        assert set(entry) == {"title", "happened", "why", "fix", "torch"}, slug
        assert all(text.strip() for text in entry.values()), slug
        assert fitting_hint(slug) in range(len(LEVELS) + 1), slug


COMMON = (
    threading.Thread,
    torch,
    list,
    dict,
    str,
    set,
    torch.Tensor,
    torch.nn.Module,
    torch.optim.Optimizer,
    Comm,
)
"""Whose attributes no unit explains: phase 1 does that of comm."""


def attributes_of_given_classes() -> set[str]:
    """Methods and fields of what templates import, but what Python and torch have."""
    comm = ROOT / "distlab" / "comm"
    rooms = ROOT / "distlab" / "given", ROOT / "distlab" / "checkpoints"
    files = [path for room in rooms for path in room.rglob("*.py")]
    names = "data/epochs.py", "data/loops.py", "data/stepped_data.py", "comm/_disk.py"
    files += [ROOT / "distlab" / name for name in names]
    found = set[str]()
    for path in (*files, comm / "services.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return {name for name in found if not any(hasattr(one, name) for one in COMMON)}


def test_given_modules_are_named_after_their_units() -> None:
    given = {path.stem for path in (ROOT / "distlab" / "given").glob("[!_]*")}
    units = set(CURRICULUM.units)
    assert given - units == {"recovery_runs"}  # no code


def test_what_a_solution_calls_is_named_in_the_template_or_the_guide() -> None:
    given = attributes_of_given_classes()
    assert {"sync_folder", "take_gradients", "manifest_name"} <= given
    unsaid = []
    for unit in CURRICULUM.units.values():
        text = unit.solution(ROOT).read_text(encoding="utf-8")
        guide = unit.guide(ROOT).read_text(encoding="utf-8")
        said = set(re.findall(r"\w+", make_template(text) + guide))
        inside = {
            line
            for region in find_regions(text)
            for line in range(region.first, region.last)
        }
        used = {
            node.attr
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Attribute) and node.lineno in inside
        }
        unsaid += [f"{unit.name}: {name}" for name in sorted(used & given - said)]
    assert not unsaid


@pytest.mark.parametrize(
    ("unit", "given", "name"),
    [
        ("fault_tolerance", "comm/_disk.py", "Disk"),
        ("sharded_optimizer", "given/sharded_optimizer/buckets.py", "Bucket"),
        ("recovery", "given/recovery.py", "Report"),
    ],
)
def test_the_guide_lists_what_an_object_has(unit: str, given: str, name: str) -> None:
    tree = ast.parse((ROOT / "distlab" / given).read_text(encoding="utf-8"))
    (body,) = [
        n.body for n in tree.body if isinstance(n, ast.ClassDef) if n.name == name
    ]
    has = {n.name for n in body if isinstance(n, ast.FunctionDef)}
    has |= {n.target.id for n in body if isinstance(n, ast.AnnAssign)}  # type: ignore[union-attr]
    guide = CURRICULUM.units[unit].guide(ROOT).read_text(encoding="utf-8")
    rows = "\n".join(re.findall(r"^\| .*`.*$", guide, re.MULTILINE))
    used = {one for one in has if not one.startswith("__")} - {"is_unsharded"}
    assert used <= set(re.findall(r"\w+", rows))
