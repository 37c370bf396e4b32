"""Several turns with a tool: the model may ask a calculator before it answers.

python examples/own_environment.py MODEL_DIRECTORY
"""

import re
import sys

from pipelines.pipeline import Pipeline


def calculate(numbers: list[str]) -> int:
    return sum(map(int, numbers))


def environment(prompt: str, turns: list[str], answer: str) -> str | None:
    """A turn with several numbers is a question to the calculator; one without is the answer, and the end."""
    numbers = re.findall(r"[+-]?\d+", turns[-1])
    return f"={calculate(numbers)}=" if len(numbers) > 1 else None


def reward(prompt: str, completion: str, answer: str, turns: list[str]) -> float:
    """`completion` is the last turn; a call of the tool costs a little."""
    return float(completion.rstrip("$").endswith(answer)) - 0.01 * (len(turns) // 2)


if __name__ == "__main__":
    result = Pipeline(
        model=sys.argv[1],
        prompts=[(f"a{i}b+{j}=", str(i + j)) for i in range(5) for j in range(1, 4)],
        environment=environment,
        reward=reward,
        steps=3,
        rollout={"group_size": 4, "max_tokens": 96},
        flow={"groups_per_step": 4, "groups_per_take": 1},
        evaluation={"prompts": 4},
    ).run()
    print(result)
