"""The tutor over MCP: the SDK's own client talks to `distlab mcp` over stdio."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import statistics
import sys
import time
from typing import Any

import pytest

from distlab.tutor.server import INSTALL, POLICY, make_server, teach
from distlab.tutor.tools import get_tools
from tests.workbench.course import EXCHANGE, FIRST, Course

HAS_SDK = importlib.util.find_spec("mcp") is not None
needs_sdk = pytest.mark.skipif(not HAS_SDK, reason=INSTALL)


@pytest.mark.skipif(HAS_SDK, reason="the SDK is installed")
def test_without_the_extra_it_is_one_line(here: Course) -> None:
    done = here.distlab("mcp")
    assert (done.code, done.out) == (2, "")
    assert done.err == f"distlab: {INSTALL}\n"
    with pytest.raises(ModuleNotFoundError, match="pip install"):
        make_server()


def test_the_prompt_teaches_and_forbids(here: Course) -> None:
    said = teach()
    assert said.startswith(POLICY)
    assert FIRST in said
    assert "C1: " in teach("1.4")
    assert "collectives.all_reduce" in teach("1.4")


def at_work(course: Course) -> dict[str, Any]:
    """What the client found out in one session."""
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "distlab", "mcp"],
        env=course.environment(),
        cwd=course.root,
    )

    log = open(course.state.with_name("server.log"), "w")  # noqa: SIM115

    async def talk() -> dict[str, Any]:
        # pytest's own standard error has no descriptor to give to a process
        transport = stdio_client(server, errlog=log)
        async with Client(transport, read_timeout_seconds=100) as client:

            async def call(name: str, **values: Any) -> Any:
                return await client.call_tool(name, values)

            told: dict[str, Any] = {}
            told["tools"] = {t.name: t for t in (await client.list_tools()).tools}
            question = {"question": "Why does my all-reduce hang?"}
            seconds = []
            for _ in range(9):
                started = time.perf_counter()
                told["explained"] = await call("explain_ddp_concepts", **question)
                seconds.append(time.perf_counter() - started)
            told["median_s"] = statistics.median(seconds)
            told["refused"] = await call("solution", task="1.1")
            told["run"] = await call("run_ddp_simulation", world_size=2, epochs=1)
            told["checked"] = await call("check", task="1.1")
            told["shown"] = await call("solution", task="1.1")
            told["unknown"] = await call("check", task="9.9")
            told["resources"] = (await client.list_resources()).resources
            told["guide"] = await client.read_resource("distlab://guide/collectives")
            told["progress"] = await client.read_resource("distlab://progress")
            told["prompt"] = await client.get_prompt("teach", {"task": "1.4"})
            return told

    with log:
        return asyncio.run(talk())


def value_of(result: Any) -> dict[str, Any]:
    assert not result.is_error, result.content
    value: dict[str, Any] = json.loads(result.content[0].text)
    return value


@needs_sdk
@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the SDK's own are not ours
def test_a_lesson_over_stdio(here: Course, capsys: pytest.CaptureFixture[str]) -> None:
    here.fill(FIRST, EXCHANGE)
    told = at_work(here)
    assert set(told["tools"]) == {tool["name"] for tool in get_tools()}
    for tool in get_tools():
        offered = told["tools"][tool["name"]]
        assert offered.description == tool["description"]
        assert set(offered.input_schema["properties"]) == set(
            tool["input_schema"]["properties"]
        )
    assert value_of(told["explained"])["topics"][0] == "hang"
    assert told["refused"].is_error
    assert "1.1" in told["refused"].content[0].text
    assert "comm.send" not in told["refused"].content[0].text
    run = value_of(told["run"])
    assert run["status"] == "finished"
    assert len(set(run["metrics"]["weight_digests"])) == 1
    assert len(run["metrics"]["weight_digests"]) == 2
    assert value_of(told["checked"])["status"] == "pass"
    assert "comm.send(" in value_of(told["shown"])["code"]
    assert told["unknown"].is_error
    uris = {str(resource.uri) for resource in told["resources"]}
    assert {"distlab://progress", "distlab://guide/collectives"} <= uris
    assert "## Idea" in told["guide"].contents[0].text
    assert FIRST in json.loads(told["progress"].contents[0].text)["tasks"]
    assert POLICY in told["prompt"].messages[0].content.text
    here.expect_nothing_left()
    with capsys.disabled():
        print(f"\nexplain over MCP: median {told['median_s'] * 1e3:.1f} ms")
