"""An agent that uses the OpenAI SDK and a tool: the model works a chain of sums, and a calculator puts its first
mistake right, from where it goes on.

asyncrl run experiment=quickstart agent.function=examples/own_agent.py:agent rollout.max_tokens=160 \
            task.median_size=5 trainer.lr=6e-4 trainer.decay_steps=25 steps=50
"""

import re

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from asyncrl.user_code.agents import Access

CALLS = 2
OPENAI = AsyncOpenAI(base_url="http://localhost", api_key="of its episode")
"""Its connections are shared by all episodes."""


def calculator(prompt: str, written: str) -> str:
    """What is written up to its first wrong step, which is put right."""
    value, right = 0, ""
    for label, move in re.findall(r"([a-z])([+-]?\d)", prompt):
        value += int(move)
        right += f"{label}{move}{value if right else ''}"
        if not written.startswith(right):
            break
    return right


async def agent(prompt: str, answer: str, access: Access) -> str:
    client = OPENAI.with_options(base_url=access.url, api_key=access.key)
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": prompt}]
    written = checked = end = ""
    for _ in range(CALLS):
        reply = (await client.chat.completions.create(model=access.model, messages=messages)).choices[0]
        written = checked + (reply.message.content or "")
        end = "$" if reply.finish_reason == "stop" else ""  # the model's end token, which replies come without
        checked = calculator(prompt, written)
        if checked == written or not end:
            break
        messages.append({"role": "assistant", "content": reply.message.content})
        messages.append({"role": "user", "content": "=" + checked})
    return written + end
