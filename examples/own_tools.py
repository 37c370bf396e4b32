"""An agent with the tools of an MCP server.

python examples/own_tools.py MODEL_DIRECTORY
"""

import sys
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from asyncrl.harnesses.mcp_tools import mcp_tools
from asyncrl.user_code.agents import Access
from pipelines.pipeline import Pipeline

SERVER = [sys.executable, str(Path(__file__).with_name("calculator_server.py"))]


async def agent(prompt: str, answer: str, access: Access) -> str | None:
    """A server of its own for each episode; with a URL in place of `SERVER`, one for all."""
    messages: list[Any] = [{"role": "user", "content": prompt}]
    async with mcp_tools(SERVER) as tools, AsyncOpenAI(base_url=access.url, api_key=access.key) as client:
        for _ in range(4):
            reply = await client.chat.completions.create(model=access.model, messages=messages, tools=tools.shown)
            said = reply.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                return said.content
            messages += [await tools.answer(call) for call in said.tool_calls]
    return None


def reward(prompt: str, completion: str, answer: str) -> float:
    return float(completion.strip().endswith(answer))


if __name__ == "__main__":
    sums = [(f"{i}+{j}=", str(i + j)) for i in range(10) for j in range(10)]
    run = Pipeline(
        model=sys.argv[1],
        prompts=sums,
        agent=agent,
        reward=reward,
        steps=3,
        rollout={"group_size": 4, "max_tokens": 512},
        flow={"groups_per_step": 2, "groups_per_take": 1},
        evaluation={"prompts": 4, "every": 0},
    )
    print(run.run())
