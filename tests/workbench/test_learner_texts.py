import importlib
import re
import tomllib
from pathlib import Path

import pytest

from distlab.curriculum import load_curriculum

ROOT = Path(__file__).resolve().parents[2]
PHASE = ROOT / "phase1_data_parallel"
TASKS = {task.number: task.id for task in load_curriculum(ROOT).tasks}
HEADINGS = [
    "Why",
    "Ideas, with pictures",
    "The contract",
    "Build it, task by task",
    "What production does more",
]
LEVELS = ["1 question", "2 principle", "3 steps", "4 near-code"]
KEYS = {"title", "happened", "why", "fix", "torch"}
VERBS = {"start", "watch", "check", "hint", "status", "demo", "doctor", "reset"}
VERBS |= {"explain", "trace", "quiz", "hunt", "use", "diff", "update", "ddp"}
VERBS |= {"sim", "scale", "calibrate"}
MISCONCEPTIONS = tomllib.loads(
    (ROOT / "distlab/curriculum/misconceptions.toml").read_text(encoding="utf-8")
)
GUIDELINES = (PHASE / "guidelines.md").read_text(encoding="utf-8")
HINTS = {path.stem: path for path in (PHASE / "hints").glob("*.md")}
TEXTS = [GUIDELINES, *(path.read_text(encoding="utf-8") for path in HINTS.values())]


def sections(text: str, level: int) -> dict[str, str]:
    """Map each heading of this level to what stands below it."""
    mark = "#" * level
    parts = re.split(rf"^{mark} (.+)$", text, flags=re.MULTILINE)[1:]
    headings, bodies = parts[::2], parts[1::2]
    assert len(headings) == len(set(headings)), f"a heading is there twice: {headings}"
    return dict(zip(headings, bodies, strict=True))


def task_names(unit: str) -> list[str]:
    return [task.split(".")[1] for task in TASKS.values() if task.startswith(unit)]


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.syspath_prepend(str(ROOT))
    pictures: dict[str, str] = {}
    for path in sorted((ROOT / "figures").glob("phase1*.py")):
        pictures |= importlib.import_module(f"figures.{path.stem}").figures()
    return pictures


def test_figures_on_disk_are_those_of_the_generator(generated: dict[str, str]) -> None:
    on_disk = {
        path.name: path.read_bytes().decode("utf-8")
        for path in (PHASE / "figures").glob("*.svg")
    }
    assert sorted(on_disk) == sorted(generated)
    for name, svg in generated.items():
        assert on_disk[name] == svg, f"{name}: run make figures"


def test_every_figure_describes_itself(generated: dict[str, str]) -> None:
    for name, svg in generated.items():
        assert re.search(r"<title [^>]*>[^<]{20,}</title>", svg), name
        assert re.search(r"<desc [^>]*>[^<]{80,}</desc>", svg), name


def test_guidelines_have_the_five_headings_in_order() -> None:
    found = [heading for heading in sections(GUIDELINES, 2) if heading in HEADINGS]
    assert found == HEADINGS


@pytest.mark.parametrize(("number", "task"), TASKS.items())
def test_guidelines_have_a_section_for_each_task(number: str, task: str) -> None:
    build = sections(sections(GUIDELINES, 2)["Build it, task by task"], 3)
    assert len(build[f"{number} {task}"].split()) > 50


def test_images_of_the_guidelines_exist_and_have_words_for_them(
    generated: dict[str, str],
) -> None:
    links = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", GUIDELINES)
    assert {Path(target).name for _, target in links} == set(generated)
    for words, target in links:
        assert (PHASE / target).is_file(), target
        assert len(words) > 40, target


def test_folds_are_closed() -> None:
    for tag in ("details", "summary"):
        assert GUIDELINES.count(f"<{tag}>") == GUIDELINES.count(f"</{tag}>") > 0


@pytest.mark.parametrize("text", TEXTS)
def test_texts_name_only_commands_that_exist(text: str) -> None:
    assert set(re.findall(r"`distlab (\w+)", text)) <= VERBS


def test_every_unit_has_a_hint_file() -> None:
    assert set(HINTS) == {task.split(".")[0] for task in TASKS.values()}


@pytest.mark.parametrize("unit", ["collectives", "data_loader", "trainer"])
def test_hints_have_four_levels_for_each_task(unit: str) -> None:
    text = HINTS[unit].read_text(encoding="utf-8")
    assert text.startswith(f"# {unit}\n")
    assert max(map(len, text.splitlines())) <= 76
    assert "<" not in re.sub(r"<-|<=", "", text), "no HTML in hints"
    tasks = sections(text, 2)
    assert list(tasks) == task_names(unit)
    for name, body in tasks.items():
        levels = sections(body, 3)
        assert list(levels) == LEVELS, name
        assert all(level.strip() for level in levels.values()), name


@pytest.mark.parametrize("slug", MISCONCEPTIONS)
def test_misconceptions_are_complete_and_fit_the_screen(slug: str) -> None:
    entry = MISCONCEPTIONS[slug]
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug)
    opens = entry.get("opens", 1)
    assert opens in range(1, len(LEVELS) + 1)
    entry = {key: text for key, text in entry.items() if key != "opens"}
    assert set(entry) == KEYS
    assert all(text.strip() for text in entry.values())
    assert len(entry["title"]) <= 60
    assert "\n" not in entry["title"]
    for text in entry.values():
        assert max(map(len, text.splitlines())) <= 76


def test_every_slug_that_the_guidelines_name_is_explained() -> None:
    named = set(re.findall(r"`\[([a-z0-9-]+)\]`", GUIDELINES))
    named |= set(re.findall(r"`distlab explain ([a-z0-9-]+)`", GUIDELINES))
    assert named <= set(MISCONCEPTIONS)
    assert named
