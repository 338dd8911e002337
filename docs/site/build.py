"""Builds the site: guide, documentation, concepts and reference; every link is checked.

    python docs/site/build.py [--out site]

Pages keep the paths that they have in the repository, so that a link which works on
GitHub works here. A link to a file that is no page leads to a page with its source.
"""

from __future__ import annotations

import argparse
import html
import json
import logging
import re
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import latex2mathml.converter
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(HERE)]

from commonmark import rewrite  # noqa: E402

from distlab.curriculum.misconceptions import read_misconceptions  # noqa: E402
from distlab.curriculum.torch_errors import COMMANDS, read_torch_errors  # noqa: E402
from distlab.tutor.concepts import read_concepts  # noqa: E402

LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")
CODE = re.compile(r"^ *(?:> *)?```.*?^ *(?:> *)?```", re.MULTILINE | re.DOTALL)
PICTURES = {".svg", ".png"}
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml"}
LANGUAGES |= {".toml": "toml", ".json": "json"}
DOCUMENTED = (
    "distlab.distributed", "distlab.launch", "distlab.engines", "distlab.monitor",
    "distlab.comm", "distlab.sim", "distlab.models", "distlab.data", "distlab.recipe",
    "distlab.tutor",
)  # fmt: skip
THEIR_WORKER = "https://unpkg.com/iframe-worker/shim"
GUIDE = ("getting-started", "contents", "judging", "tutor", "instructors")
LIBRARY = ("training", "library", "engines", "chaos", "deployment", "benchmarks")
TOOLS = ("hangs", "hang-tools", "audit", "pytest", "simulator", "plan")


def anchor_of(title: str, _separator: str = "-") -> str:
    """Return the anchor that GitHub gives a heading."""
    kept = re.sub(r"[^\w\- ]", "", html.unescape(title).strip().lower())
    return kept.replace(" ", "-")


class Source:
    """The folder that MkDocs reads: pages with their links put right, and pictures."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: set[Path] = set()

    def add(self, path: Path) -> str:
        """Take a page of the repository, and what it links to; its path in the site."""
        name = path.relative_to(ROOT).as_posix()
        if path not in self._known:
            self._known.add(path)
            text = path.read_text(encoding="utf-8")
            self.write(name, rewrite(self._linked(text, path.parent)))
        return name

    def write(self, name: str, text: str) -> None:
        """Write a page."""
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def _linked(self, text: str, folder: Path) -> str:
        """Return the text with links that lead to pages of the site."""
        parts, end = [], 0
        for code in CODE.finditer(text):
            parts += [self._links(text[end : code.start()], folder), code[0]]
            end = code.end()
        return "".join([*parts, self._links(text[end:], folder)])

    def _links(self, text: str, folder: Path) -> str:
        def put_right(found: re.Match[str]) -> str:
            label, link = found[1], found[2]
            name, mark, anchor = link.partition("#")
            target = (folder / name).resolve()
            if not name or "://" in link or not target.is_relative_to(ROOT):
                return found[0]
            if target.is_dir():
                if not (target / "README.md").is_file():
                    return label.strip("[]")
                target, name = target / "README.md", f"{name.rstrip('/')}/README.md"
            if target.suffix == ".md":
                self.add(target)
            elif target.suffix in PICTURES:
                self._copy(target)
            elif target.is_file():
                self._source_page(target)
                name += ".md"
            return f"{label}({name}{mark}{anchor})"

        return LINK.sub(put_right, text)

    def _copy(self, path: Path) -> None:
        target = self.folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)

    def _source_page(self, path: Path) -> None:
        name = path.relative_to(ROOT).as_posix()
        body = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            text = rewrite(self._linked(notebook(json.loads(body)), path.parent))
            self.write(f"{name}.md", text)
            return
        head = "---\nsearch:\n  exclude: true\nhide: [toc]\n---\n"
        language = LANGUAGES.get(path.suffix, "text")
        block = f"````{language}\n{body}\n````\n"
        self.write(f"{name}.md", f"{head}# {path.name}\n\n`{name}`\n\n{block}")


def notebook(data: dict[str, Any]) -> str:
    """Return a notebook as Markdown: its texts, its code, and what that printed."""
    parts = []
    for cell in data["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
    return "\n\n".join(parts)


def guide_link(page: str, units: dict[str, str]) -> str:
    """Return `unit#heading` as a link from a page in concepts/."""
    unit, mark, anchor = page.partition("#")
    shown = f"{unit}: {anchor.replace('-', ' ')}" if anchor else unit
    return f"[{shown}](../{units[unit]}/guide/{unit}.md{mark}{anchor})"


def add_concepts(source: Source, units: dict[str, str]) -> list[Any]:
    """Write the tutor's concepts, mistakes and errors; their part of the menu."""
    topics: dict[str, list[str]] = {}
    for concept in read_concepts().values():
        text = [
            f"## {concept.title} {{ #{concept.name} }}", "",
            f"`distlab explain {concept.name}`", "", concept.text, "",
            f"```python\n{concept.snippet}\n```", "", "It prints:", "",
            f"```text\n{concept.prints}\n```", "",
        ]  # fmt: skip
        if concept.guide:
            links = ", ".join(guide_link(page, units) for page in concept.guide)
            text += [f"Read on: {links}.", ""]
        topics.setdefault(concept.topic, []).append("\n".join(text))
    pages: list[Any] = []
    for topic, texts in topics.items():
        title = topic.replace("_", " ").capitalize()
        source.write(f"concepts/{topic}.md", f"# {title}\n\n" + "\n".join(texts))
        pages.append({title: f"concepts/{topic}.md"})
    parts = ["# Mistakes\n\nThe names in square brackets in a verdict.\n"]
    for slug, entry in read_misconceptions().items():
        parts.append(f"## {entry['title']} {{ #{slug} }}\n\n`[{slug}]`\n")
        told = (entry[key] for key in ("happened", "why", "fix", "torch"))
        parts += [f"{escaped(text)}\n" for text in told]
    source.write("concepts/mistakes.md", "\n".join(parts))
    parts = ["# Errors of torch\n\nPaste one into `distlab explain`.\n"]
    for error in read_torch_errors():
        parts.append(f"## {error.title} {{ #{error.name} }}\n")
        parts += [f"{escaped(text)}\n" for text in (error.means, error.why, error.look)]
        for verb, reason in (COMMANDS[name] for name in error.run):
            parts.append(f"`distlab {verb}`: {reason}.\n")
    source.write("concepts/errors.md", "\n".join(parts))
    pages.append({"Mistakes": "concepts/mistakes.md"})
    return [*pages, {"Errors of torch": "concepts/errors.md"}]


def escaped(text: str) -> str:
    """Return plain text as Markdown that shows it as it is."""
    return re.sub(r"([*_<\[])", r"\\\1", text.strip())


def add_reference(source: Source) -> list[Any]:
    """Write a page for each documented package; their part of the menu."""
    pages = []
    for name in DOCUMENTED:
        source.write(f"reference/{name}.md", f"# {name}\n\n::: {name}\n")
        pages.append({name: f"reference/{name}.md"})
    return pages


def gather(source: Source) -> list[Any]:
    """Write all pages; the menu."""
    with (ROOT / "curriculum.toml").open("rb") as file:
        phases = tomllib.load(file)["phase"]
    menu: list[Any] = [{"distlab": source.add(ROOT / "README.md")}]
    docs = ROOT / "docs"
    learn: list[Any] = [source.add(docs / "README.md")]
    learn += [source.add(docs / f"{name}.md") for name in GUIDE]
    menu.append({"Learn": [*learn, source.add(ROOT / "GLOSSARY.md")]})
    units = {}
    for phase in phases:
        folder = ROOT / phase["folder"]
        pages: list[Any] = [source.add(folder / "guidelines.md")]
        names = [unit["name"] for unit in phase["unit"]]
        listed = [folder / "guide" / f"{name}.md" for name in names]
        more = [one for one in sorted(folder.glob("guide/*.md")) if one not in listed]
        for page in [*listed, *more]:
            pages.append({page.stem: source.add(page)})
        units |= dict.fromkeys(names, phase["folder"])
        menu.append({f"{phase['number']} · {phase['title']}": pages})
    menu.append({"Concepts": add_concepts(source, units)})
    library = [source.add(docs / f"{name}.md") for name in LIBRARY]
    tools = [source.add(docs / f"{name}.md") for name in TOOLS]
    menu.append({"Use": [*tools, *library]})
    menu.append({"Reference": add_reference(source)})
    project = [source.add(ROOT / name) for name in ("CONTRIBUTING.md", "CHANGELOG.md")]
    menu.append({"Project": project})
    shutil.copy(HERE / "extra.css", source.folder / "extra.css")
    return menu


def with_mathml(content: str, **_: Any) -> str:
    """Return a page in which formulas are MathML, which browsers draw themselves."""

    def drawn(found: re.Match[str]) -> str:
        block = found[1] == "div"
        tex = html.unescape(found[2]).strip()[2:-2].strip()
        how = "block" if block else "inline"
        return latex2mathml.converter.convert(tex, display=how)

    return re.sub(
        r'<(span|div) class="arithmatex">(.*?)</\1>', drawn, content, flags=re.DOTALL
    )


def own_worker(out: Path) -> None:
    """Replace the theme's script for the search, which is elsewhere, by ours."""
    shutil.copy(HERE / "worker.js", out / "assets" / "worker.js")
    for page in out.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        up = "../" * (len(page.relative_to(out).parts) - 1)
        page.write_text(text.replace(THEIR_WORKER, f"{up}assets/worker.js"), "utf-8")


def main() -> int:
    """Build; the exit code is 1 if anything at all was complained about."""
    options = argparse.ArgumentParser()
    options.add_argument("--out", type=Path, default=ROOT / "site")
    out = options.parse_args().out.resolve()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    with tempfile.TemporaryDirectory() as folder:
        source = Source(Path(folder) / "pages")
        source.folder.mkdir()
        menu = gather(source)
        settings = (HERE / "mkdocs.yml").read_text(encoding="utf-8")
        settings = settings.replace("HERE", str(HERE))
        file = Path(folder) / "mkdocs.yml"
        nav = yaml.safe_dump({"nav": menu}, allow_unicode=True)
        file.write_text(f"{settings}\n{nav}", encoding="utf-8")
        config = load_config(
            str(file), docs_dir=str(source.folder), site_dir=str(out), strict=True
        )
        config.mdx_configs["toc"] |= {"slugify": anchor_of}
        config.plugins.events["page_content"].append(with_mathml)
        build(config)
    own_worker(out)
    print(f"site: {out / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
