import importlib
import re
import tomllib
from pathlib import Path

import pytest

from distlab.curriculum import load_curriculum

ROOT = Path(__file__).resolve().parents[2]
PHASES = {phase.folder: phase for phase in load_curriculum(ROOT).phases}
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
VERBS |= {"sim", "scale", "calibrate", "bench"}
MISCONCEPTIONS = tomllib.loads(
    (ROOT / "distlab/curriculum/misconceptions.toml").read_text(encoding="utf-8")
)
HINTS = {
    path.stem: path for folder in PHASES for path in (ROOT / folder).glob("hints/*.md")
}
TEXTS = [*HINTS.values(), *(ROOT / folder / "guidelines.md" for folder in PHASES)]

each_phase = pytest.mark.parametrize("folder", PHASES)


def sections(text: str, level: int) -> dict[str, str]:
    """Map each heading of this level to what stands below it."""
    mark = "#" * level
    parts = re.split(rf"^{mark} (.+)$", text, flags=re.MULTILINE)[1:]
    headings, bodies = parts[::2], parts[1::2]
    assert len(headings) == len(set(headings)), f"a heading is there twice: {headings}"
    return dict(zip(headings, bodies, strict=True))


def task_names(unit: str) -> list[str]:
    return [
        task.split(".")[1] for task in TASKS.values() if task.partition(".")[0] == unit
    ]


def guidelines(folder: str) -> str:
    return (ROOT / folder / "guidelines.md").read_text(encoding="utf-8")


@pytest.fixture
def generated(folder: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.syspath_prepend(str(ROOT))
    pictures: dict[str, str] = {}
    for path in sorted((ROOT / "figures").glob(f"{folder.partition('_')[0]}*.py")):
        pictures |= importlib.import_module(f"figures.{path.stem}").figures()
    return pictures


@each_phase
def test_figures_on_disk_are_those_of_the_generator(
    folder: str, generated: dict[str, str]
) -> None:
    on_disk = {
        path.name: path.read_bytes().decode("utf-8")
        for path in (ROOT / folder / "figures").glob("*.svg")
    }
    assert sorted(on_disk) == sorted(generated)
    for name, svg in generated.items():
        assert on_disk[name] == svg, f"{name}: run make figures"


@each_phase
def test_every_figure_describes_itself(generated: dict[str, str]) -> None:
    for name, svg in generated.items():
        assert re.search(r"<title [^>]*>[^<]{20,}</title>", svg), name
        assert re.search(r"<desc [^>]*>[^<]{80,}</desc>", svg), name


@each_phase
def test_guidelines_have_the_five_headings_in_order(folder: str) -> None:
    found = [title for title in sections(guidelines(folder), 2) if title in HEADINGS]
    assert found == HEADINGS


@each_phase
def test_guidelines_have_a_section_for_each_task(folder: str) -> None:
    build = sections(sections(guidelines(folder), 2)["Build it, task by task"], 3)
    for task in (task for unit in PHASES[folder].units for task in unit.tasks):
        assert len(build[f"{task.number} {task.id}"].split()) > 50, task.id


@each_phase
def test_images_of_the_guidelines_exist_and_have_words_for_them(
    folder: str, generated: dict[str, str]
) -> None:
    links = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", guidelines(folder))
    assert {Path(target).name for _, target in links} == set(generated)
    for words, target in links:
        assert (ROOT / folder / target).is_file(), target
        assert len(words) > 40, target


@each_phase
def test_folds_are_closed(folder: str) -> None:
    text = guidelines(folder)
    for tag in ("details", "summary"):
        assert text.count(f"<{tag}>") == text.count(f"</{tag}>") > 0


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_texts_name_only_commands_that_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert set(re.findall(r"`distlab (\w+)", text)) <= VERBS


def test_every_unit_has_a_hint_file() -> None:
    assert set(HINTS) == {task.split(".")[0] for task in TASKS.values()}


@pytest.mark.parametrize("unit", HINTS)
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


@each_phase
def test_every_slug_that_the_guidelines_name_is_explained(folder: str) -> None:
    text = guidelines(folder)
    named = set(re.findall(r"`\[([a-z0-9-]+)\]`", text))
    named |= set(re.findall(r"`distlab explain ([a-z0-9-]+)`", text))
    assert named <= set(MISCONCEPTIONS)
    assert named
