import importlib
import re
import tomllib
from pathlib import Path

import pytest

from distlab.curriculum import load_curriculum

ROOT = Path(__file__).resolve().parents[2]
PHASES = {phase.folder: phase for phase in load_curriculum(ROOT).phases}
TASKS = {task.number: task.id for task in load_curriculum(ROOT).tasks}
INDEX = [
    "Contents",
    "Before you start",
    "Time table",
    "Why",
    "How work is judged",
    "What you can now explain",
    "What it is called elsewhere",
]
PAGE = [
    "Why",
    "Idea",
    "A worked example",
    "The tasks",
    "What production systems add",
    "References",
]
LEVELS = ["1 question", "2 principle", "3 steps", "4 near-code"]
KEYS = {"title", "happened", "why", "fix", "torch"}
VERBS = {"start", "watch", "check", "hint", "status", "demo", "doctor", "reset"}
VERBS |= {"explain", "trace", "quiz", "hunt", "use", "diff", "update", "ddp"}
VERBS |= {"sim", "scale", "calibrate", "bench", "mcp", "chaos", "score", "drill"}
MISCONCEPTIONS = {
    slug: entry
    for path in (ROOT / "distlab/curriculum/misconceptions").glob("*.toml")
    for slug, entry in tomllib.loads(path.read_text(encoding="utf-8")).items()
}
HINTS = {
    path.stem: path for folder in PHASES for path in (ROOT / folder).glob("hints/*.md")
}
GUIDES = [
    path
    for folder in PHASES
    for path in (ROOT / folder / "guidelines.md", *(ROOT / folder).glob("guide/*.md"))
]
PAGES = {
    unit.name: ROOT / folder / "guide" / f"{unit.name}.md"
    for folder, phase in PHASES.items()
    for unit in phase.units
}
TEXTS = [*HINTS.values(), *GUIDES]

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


def guide(folder: str) -> dict[Path, str]:
    """Every page of a phase's guide."""
    return {
        path: path.read_text(encoding="utf-8")
        for path in GUIDES
        if path.is_relative_to(ROOT / folder)
    }


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
def test_the_index_has_its_headings_in_order_and_is_short(folder: str) -> None:
    text = (ROOT / folder / "guidelines.md").read_text(encoding="utf-8")
    assert [title for title in sections(text, 2) if title in INDEX] == INDEX
    assert text.count("\n") <= 300


@pytest.mark.parametrize("unit", PAGES)
def test_a_page_has_its_headings_in_order_and_a_section_for_each_task(
    unit: str,
) -> None:
    text = PAGES[unit].read_text(encoding="utf-8")
    parts = sections(text, 2)
    assert list(parts) == PAGE
    assert all(len(body.split()) > 30 for body in parts.values())
    tasks = sections(parts["The tasks"], 3)
    for number, task in TASKS.items():
        if task.partition(".")[0] == unit:
            assert len(tasks[f"{number} {task}"].split()) > 50, task
    links = re.findall(
        r"^- .*\]\((https?://[^)]+)\)", parts["References"], re.MULTILINE
    )
    assert 3 <= len(links) <= 8


@each_phase
def test_the_time_table_has_every_task_with_its_minutes(folder: str) -> None:
    text = (ROOT / folder / "guidelines.md").read_text(encoding="utf-8")
    table = sections(text, 2)["Time table"]
    for unit in PHASES[folder].units:
        for task in unit.tasks:
            row = rf"^\| {task.number} \[`{task.id}`\]\(guide/{unit.name}\.md#\S+\) "
            row += rf"\|.*\| {task.minutes} \| \d+ \|$"
            assert re.search(row, table, re.MULTILINE), task.id


@each_phase
def test_images_of_the_guide_exist_and_have_words_for_them(
    folder: str, generated: dict[str, str]
) -> None:
    shown = set()
    for page, text in guide(folder).items():
        for words, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", text):
            shown.add(Path(target).name)
            assert (page.parent / target).is_file(), target
            assert len(words) > 40, target
    assert shown == set(generated)


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_links_lead_to_files_and_headings_that_exist(path: Path) -> None:
    for link in re.findall(r"(?<!!)\[[^\]]+\]\(([^)]+)\)", path.read_text("utf-8")):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        if anchor:
            text = target.read_text(encoding="utf-8")
            titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
            assert anchor in {anchor_of(title) for title in titles}, link


def anchor_of(title: str) -> str:
    """The anchor that GitHub gives a heading."""
    kept = re.sub(r"[^\w\- ]", "", title.lower())
    return kept.replace(" ", "-")


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_folds_are_closed(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
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
def test_every_slug_that_the_guide_names_is_explained(folder: str) -> None:
    text = "\n".join(guide(folder).values())
    named = set(re.findall(r"`\[([a-z0-9-]+)\]`", text))
    named |= set(re.findall(r"`distlab explain ([a-z0-9-]+)`", text))
    assert named <= set(MISCONCEPTIONS)
    assert named
