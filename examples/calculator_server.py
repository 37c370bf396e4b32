"""An MCP server with one tool, on stdin and stdout: `own_tools.py` starts it."""

from mcp.server import MCPServer

server = MCPServer("calculator")


@server.tool()
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


if __name__ == "__main__":
    server.run("stdio")
