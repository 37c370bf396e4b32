"""An environment of `verifiers` 0.4, trained as it is: its tasks, its harness with a tool, its reward.

python examples/own_taskset.py MODEL_DIRECTORY
"""

import json
import sys

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["Sums", "WithCalculator"]
TOOL = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOLS = [{"type": "function", "function": {"name": "calculate", "description": "Adds numbers.", "parameters": TOOL}}]


class Sum(vf.TaskData):
    answer: str


class SumTask(vf.Task[Sum, vf.State, vf.TaskConfig]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip().endswith(self.data.answer))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> list[SumTask]:
        pairs = [(i, j) for i in range(10, 20) for j in range(10, 20)]
        return [SumTask(Sum(prompt=f"{i}+{j}=", answer=str(i + j)), self.config.task) for i, j in pairs]


class WithCalculator(vf.Harness[vf.HarnessConfig]):
    """In this process, in place of a program: all that counts is that it calls the model at `endpoint`."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(3):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages, tools=TOOLS)
                said = reply.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                for call in said.tool_calls or ():
                    numbers = json.loads(call.function.arguments)["expression"].split("+")
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(sum(map(int, numbers)))})
                if not said.tool_calls:
                    break
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


if __name__ == "__main__":
    from asyncrl.config.task import VerifiersTask
    from pipelines.pipeline import Pipeline

    task, flow = VerifiersTask(environment="own_taskset"), {"groups_per_step": 2, "groups_per_take": 1}
    settings = {"steps": 3, "rollout": {"group_size": 4, "max_tokens": 512}, "flow": flow}
    print(Pipeline(model=sys.argv[1], prompts=task, evaluation={"prompts": 4, "every": 0}, **settings).run())
