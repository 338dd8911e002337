"""The built site in a real browser, opened from its folder: `make test-docs`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import PROGRAM, Browser, browser

SITE = Path(__file__).resolve().parents[2] / "site"
WIDTHS = {"phone": (390, 844), "desktop": (1280, 800)}
SOURCES = r"\.(py|toml|sh|sbatch|yaml|json)\.html$"
PAGES = sorted(SITE.rglob("*.html"))
SHOWN = [
    page
    for page in PAGES
    if page.name != "404.html" and not re.search(SOURCES, page.name)
]
_TOO_WIDE = """(() => {
  const inside = (one) => { for (; one; one = one.parentElement) {
    const how = getComputedStyle(one).overflowX;
    if (how === "auto" || how === "scroll") return true; } return false; };
  return [...document.querySelectorAll(".md-content *")]
    .filter((one) => one.getBoundingClientRect().right > innerWidth + 1)
    .filter((one) => !inside(one.parentElement) && one.checkVisibility())
    .map((one) => `${one.tagName} ${one.textContent.slice(0, 40)}`).slice(0, 3);
})()"""


@pytest.fixture(scope="module")
def web() -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("no chromium here: the site is not opened in a browser")
    with browser() as one:
        yield one


def test_every_part_is_there() -> None:
    names = {page.relative_to(SITE).as_posix() for page in SHOWN}
    assert {
        "index.html",
        "docs/getting-started.html",
        "phase1_data_parallel/guide/collectives.html",
        "phase4_production/guidelines.html",
        "concepts/messages.html",
        "reference/distlab.distributed.html",
    } <= names


def test_formulas_are_drawn_and_answers_open() -> None:
    page = SITE / "phase1_data_parallel/guide/trainer.html"
    text = page.read_text(encoding="utf-8")
    assert "<math" in text
    assert "arithmatex" not in text
    assert "<details" in text
    for one in SHOWN:
        text = one.read_text(encoding="utf-8")
        assert "&lt;details" not in text, one
        assert "<details>" not in text, one  # has no class: it isn't parsed inside


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_window(web: Browser, width: str) -> None:
    web.resize(*WIDTHS[width])
    wrong = []
    for page in SHOWN:
        web.go(page.as_uri())
        too_wide = web.script(_TOO_WIDE)
        across = web.script("document.documentElement.scrollWidth - innerWidth")
        elsewhere = [one for one in web.requests() if one.startswith("http")]
        if too_wide or across > 0 or elsewhere or web.complaints():
            name = page.relative_to(SITE).as_posix()
            wrong.append((name, too_wide, across, elsewhere, web.complaints()))
    assert not wrong


@pytest.mark.parametrize("width", WIDTHS)
def test_the_search_finds_the_ring(web: Browser, width: str) -> None:
    web.resize(*WIDTHS[width])
    web.go((SITE / "index.html").as_uri())
    web.script("document.querySelector('.md-search__input').focus()")
    web.call("Input.insertText", text="ring all-reduce")
    web.key("Shift")  # the search listens to keys
    links = "[...document.querySelectorAll('.md-search-result__item a')].slice(0, 3)"
    web.until(f"{links}.some((one) => one.href.includes('guide/ring_allreduce.html'))")


def test_a_block_of_code_can_be_copied(web: Browser) -> None:
    web.resize(*WIDTHS["desktop"])
    web.go((SITE / "docs/hangs.html").as_uri())
    web.until("document.querySelectorAll('.md-clipboard, .md-code__button').length > 0")
