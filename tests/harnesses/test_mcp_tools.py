"""Tools of an MCP server in a process of its own, in an episode through a real gateway."""

import asyncio
from types import SimpleNamespace
from typing import Any

from mcp.server import MCPServer

from asyncrl.harnesses.mcp_tools import mcp_tools
from examples import own_tools
from tests.support.gateways import Script, running_gateway


def test_the_example_calls_the_tool_of_its_server() -> None:
    script = Script('<call>add {"a": 2, "b": 3}</call>', "it is 5")
    with running_gateway() as gateway:
        access = gateway.open(script)
        assert asyncio.run(own_tools.agent("2+3=", "5", access)) == "it is 5"
        _, episode = gateway.do(gateway.server.end("1-0")).trajectory()
    assert [turn.tool_calls for turn in episode.turns] == [1, 0]
    assert not episode.branches


def _calculator() -> MCPServer:
    server = MCPServer("calculator")

    @server.tool()
    def divide(a: int, b: int) -> float:
        """a over b."""
        return a / b

    return server


def test_what_the_model_does_wrong_is_told_to_it() -> None:
    async def said(*calls: tuple[str, str]) -> tuple[list[dict[str, Any]], list[str]]:
        async with mcp_tools(_calculator()) as tools:
            return tools.shown, [await tools.call(*each) for each in calls]

    shown, (right, unknown, no_json, no_object, wrong_type, fails) = asyncio.run(
        said(
            ("divide", '{"a": 6, "b": 3}'),
            ("times", "{}"),
            ("divide", "{a"),
            ("divide", "[6, 3]"),
            ("divide", '{"a": "x", "b": 3}'),
            ("divide", '{"a": 1, "b": 0}'),
        )
    )
    function = shown[0]["function"]
    assert (shown[0]["type"], function["name"], function["description"]) == ("function", "divide", "a over b.")
    assert set(function["parameters"]["properties"]) == {"a", "b"}
    assert right == "2.0"
    assert unknown == "error: there is no tool 'times'; the tools are divide"
    assert no_json.startswith("error: the arguments are not JSON")
    assert no_object == "error: the arguments are not a JSON object"
    assert wrong_type.startswith("error: ")
    assert fails.startswith("error: ")


def test_an_answer_belongs_to_its_call() -> None:
    call = SimpleNamespace(id="call_7", function=SimpleNamespace(name="divide", arguments='{"a": 6, "b": 3}'))

    async def answered() -> dict[str, Any]:
        async with mcp_tools(_calculator()) as tools:
            return await tools.answer(call)

    assert asyncio.run(answered()) == {"role": "tool", "tool_call_id": "call_7", "content": "2.0"}
