"""Serve the tutor over MCP: tools, guide pages, progress, and a teaching prompt.

Source: the Model Context Protocol, https://modelcontextprotocol.io/specification. We
use the server of its Python SDK, version 2.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distlab.curriculum import Curriculum, Progress, load_curriculum
from distlab.tutor.lessons import next_task
from distlab.tutor.tools import get_tools

POLICY = """\
You tutor someone who is learning distributed training. Teach, but do not solve.
- Until a task has passed, never write its body, not even in parts, and do not read
  files below solutions/ or distlab/curriculum/mistakes/ for it. The tool `solution`
  refuses as well.
- Begin with next_task. Ask what the learner expects before you run anything.
- After a failing check, ask the learner what the verdict means. Then explain it, and
  only then give one hint.
- `hint` goes one level deeper each time, so do not call it twice in a row.
- Explain with explain_ddp_concepts and with pages of the guide, in plain words,
  and let the learner type the code.
- Once a task has passed, compare the learner's code with the reference, which
  `solution` then shows."""

INSTALL = 'distlab mcp needs the MCP SDK: pip install -e ".[mcp]"'


def make_server() -> Any:
    """Create an `mcp.server.MCPServer` and register everything with it.

    Raises:
        ModuleNotFoundError: the SDK is not installed, or is older than version 2.
    """
    try:
        sdk = importlib.import_module("mcp.server")
        errors = importlib.import_module("mcp.server.mcpserver.exceptions")
        server = sdk.MCPServer("distlab", instructions=POLICY, log_level="WARNING")
    except (ModuleNotFoundError, AttributeError) as error:
        raise ModuleNotFoundError(INSTALL) from error
    lock = threading.Lock()
    for tool in get_tools():
        server.add_tool(
            _alone(tool["callable"], lock, errors.ToolError),
            name=tool["name"],
            description=tool["description"],
        )
    _add_resources(server, load_curriculum())
    server.prompt(
        name="teach", description="Make the assistant a tutor for the next task."
    )(teach)
    return server


def teach(task: str = "") -> str:
    """Return the prompt that an assistant gets at the beginning of a lesson."""
    curriculum = load_curriculum()
    about = curriculum.task(task) if task else curriculum.task(next_task()["id"])
    clauses = "\n".join(f"- {name}: {text}" for name, text in about.clauses.items())
    return (
        f"{POLICY}\n\nThe lesson: {about.number} {about.id}, {about.title} "
        f"(about {about.minutes} minutes).\nIt passes when:\n{clauses}\n\n"
        "Start with one question that shows whether the learner has the idea of this "
        "task. Wait for the answer."
    )


def _alone(
    function: Callable[..., dict[str, Any]],
    lock: threading.Lock,
    error_type: type[Exception],
) -> Callable[..., dict[str, Any]]:
    """Run one tool at a time, and keep its output out of the protocol's messages.

    The SDK passes on only the text of its own error, since others could hold secrets.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> dict[str, Any]:
        with lock, contextlib.redirect_stdout(sys.stderr):
            try:
                return function(*args, **kwargs)
            except (ValueError, OSError) as error:
                raise error_type(str(error)) from error

    return call


def _add_resources(server: Any, curriculum: Curriculum) -> None:
    for phase in curriculum.phases:
        page = curriculum.root / phase.folder / "guidelines.md"
        _add_page(server, f"distlab://guide/phase{phase.number}", phase.title, page)
        for unit in phase.units:
            uri = f"distlab://guide/{unit.name}"
            _add_page(server, uri, unit.summary, unit.guide(curriculum.root))
    server.resource(
        "distlab://progress",
        name="progress",
        title="What the learner has passed",
        mime_type="application/json",
    )(_progress)


def _add_page(server: Any, uri: str, title: str, path: Path) -> None:
    name = uri.rpartition("/")[2]
    register = server.resource(uri, name=name, title=title, mime_type="text/markdown")

    def read() -> str:
        return path.read_text(encoding="utf-8")

    register(read)


def _progress() -> str:
    curriculum = load_curriculum()
    kept = Progress(curriculum.root).read()
    shown = {name: kept.get(name, {}) for name in ("tasks", "last", "hunts", "tests")}
    return json.dumps({**shown, "next": next_task()}, indent=1)
