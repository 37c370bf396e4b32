"""Tools of an MCP server, for a harness: shown to the model in OpenAI's form, and called with what it wrote.

async with mcp_tools([sys.executable, "my_server.py"]) as tools:
    reply = await client.chat.completions.create(model=access.model, messages=messages, tools=tools.shown)
    for call in reply.choices[0].message.tool_calls or ():
        messages.append(await tools.answer(call))
"""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from asyncrl.system.optional import require


class McpTools:
    """Of one connection; calls may overlap."""

    def __init__(self, client: Any, shown: list[dict[str, Any]], timeout_s: float) -> None:
        self.shown = shown
        """For `tools=` of a chat completion."""
        self._client, self._timeout_s = client, timeout_s

    async def answer(self, call: Any) -> dict[str, Any]:
        """The message that answers a tool call of a chat completion."""
        content = await self.call(call.function.name, call.function.arguments)
        return {"role": "tool", "tool_call_id": call.id, "content": content}

    async def call(self, name: str, arguments: str) -> str:
        """What the tool says. What the model has done wrong is said too, for it to do better; a server that is gone or
        takes too long raises."""
        if name not in (known := [tool["function"]["name"] for tool in self.shown]):
            return f"error: there is no tool {name!r}; the tools are {', '.join(known)}"
        try:
            given: Any = json.loads(arguments or "{}")
        except ValueError as error:
            return f"error: the arguments are not JSON: {error}"
        if not isinstance(given, dict):
            return "error: the arguments are not a JSON object"
        mcp = require("mcp", extra="mcp")
        try:
            result = await self._client.call_tool(name, given, read_timeout_seconds=self._timeout_s)
        except mcp.MCPError as error:
            if error.code != mcp.types.INVALID_PARAMS:
                raise
            return f"error: {error}"
        text = "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in result.content)
        return f"error: {text}" if result.is_error else text


@asynccontextmanager
async def mcp_tools(server: str | Sequence[str] | Any, *, timeout_s: float = 60.0) -> AsyncGenerator[McpTools, None]:
    """`server`: the URL of one that runs, the words of a program that is started and speaks on its stdin and stdout, or
    what `mcp.Client` takes. `timeout_s` is for one call."""
    mcp = require("mcp", extra="mcp")
    if isinstance(server, Sequence) and not isinstance(server, str):
        server = mcp.StdioServerParameters(command=server[0], args=list(server[1:]))
    async with mcp.Client(server) as client:
        yield McpTools(client, [_shown(tool) for tool in await _listed(client)], timeout_s)


async def _listed(client: Any) -> list[Any]:
    tools: list[Any] = []
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        if (cursor := page.next_cursor) is None:
            return tools


def _shown(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}
