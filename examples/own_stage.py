"""Between the reward and the buffer: a filter that drops, and a judge that looks at the reward again.

python examples/own_stage.py MODEL_DIRECTORY
"""

import asyncio
import sys

from asyncrl.user_code.stages import Drop, Sample
from pipelines.pipeline import Pipeline


def ended(samples: list[Sample]) -> list[Sample | Drop]:
    """Truncated completions are not trained on; with one of them its group is dropped and counted."""
    return [sample if sample.finished else Drop("cut_off") for sample in samples]


async def judge(samples: list[Sample]) -> list[Sample | Drop]:
    """Asks somebody else about all samples at once; short completions please it."""
    opinions = await asyncio.gather(*(opinion(sample) for sample in samples))
    return [sample.rewarded(sample.reward + 0.1 * liked) for sample, liked in zip(samples, opinions, strict=True)]


async def opinion(sample: Sample) -> float:
    await asyncio.sleep(0)  # a request to a model that judges would be here
    return 1 / sample.tokens


if __name__ == "__main__":
    result = Pipeline(
        model=sys.argv[1],
        prompts="chains",
        stages=[ended, judge],
        steps=3,
        rollout={"group_size": 2, "max_tokens": 64},
        flow={"groups_per_step": 4, "groups_per_take": 1},
        evaluation={"prompts": 4},
    ).run()
    print(result.summary["ledger"]["dropped"])
