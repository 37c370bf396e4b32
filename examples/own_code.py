"""Programs as answers: three problems, and the reward that runs what the model writes, in a sandbox.

python examples/own_code.py problems.jsonl      # writes the problems and judges the answers below
asyncrl run task=code task.path=problems.jsonl model=checkpoint model.path=MODEL_DIRECTORY rollout.chat=true
"""

import asyncio
import json
import sys

from asyncrl.config import Reward
from asyncrl.config.task import CodeTask, Limits
from asyncrl.tasks.registry import make_task
from asyncrl.user_code.pool import RewardPool
from asyncrl.user_code.protocol import RewardInput, RewardResult

PROBLEMS = {
    "Print the sum of the numbers read.": [{"stdin": "1 2\n", "stdout": "3"}, {"stdin": "", "stdout": "0"}],
    "Print the arguments in reverse.": [{"args": ["a", "b"], "stdout": "b a"}],
    "Write is_even(n).": [{"call": "is_even", "args": [n], "returns": n % 2 == 0} for n in (2, 7)],
}
SUM = "import sys\nprint(sum(map(int, sys.stdin.read().split())))"
REVERSE = "import sys\nprint(*sys.argv[:0:-1])"
EVEN = "def is_even(n):\n    return n % 2 == 0"


async def judge(path: str, answers: list[str], function: str = "asyncrl.rewards.code:reward") -> list[RewardResult]:
    task = make_task(CodeTask(path=path, held_out=0, limits=Limits(cpu_s=1)), seed=0)
    prompts = sorted((task.prompt("train", i) for i in range(3)), key=lambda prompt: prompt.uid)  # as in the file
    pool = RewardPool(Reward(function=function, timeout_s=60))
    results = await pool.score([RewardInput(p.text, a, p.answer) for p, a in zip(prompts, answers, strict=True)])
    await pool.close()
    return results


if __name__ == "__main__":
    with open(sys.argv[1], "w") as file:
        file.writelines(json.dumps({"prompt": text, "tests": tests}) + "\n" for text, tests in PROBLEMS.items())
    print(asyncio.run(judge(sys.argv[1], [f"So:\n```python\n{program}\n```\n" for program in (SUM, REVERSE, EVEN)])))
