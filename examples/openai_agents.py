"""An agent of the OpenAI Agents SDK, with a tool. Its model is the policy.

python examples/openai_agents.py MODEL_DIRECTORY
"""

import sys

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

from asyncrl.user_code.agents import Access
from pipelines.pipeline import Pipeline

OFFLINE = RunConfig(tracing_disabled=True)  # else it sends what it does to OpenAI


@function_tool
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


async def agent(prompt: str, answer: str, access: Access) -> str:
    async with AsyncOpenAI(base_url=access.url, api_key=access.key) as client:
        model = OpenAIChatCompletionsModel(model=access.model, openai_client=client)
        solver = Agent(name="solver", instructions="Use the tool.", model=model, tools=[add])
        result = await Runner.run(solver, prompt, max_turns=4, run_config=OFFLINE)
    return str(result.final_output)


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
