"""Two sources of prompts, mixed, and asked by how often they are solved.

    python examples/own_curriculum.py [MODEL_DIRECTORY]

Prompts that are solved sometimes, or not yet, come again; those that are always solved are left out of most passes.
"""

import sys

from asyncrl.config import WarmStart
from asyncrl.config.task import ChainsTask, MixTask, PythonTask, Source
from asyncrl.observe.query.queries import READY
from asyncrl.observe.query.tables import open_run
from pipelines.pipeline import Pipeline


def table() -> list[tuple[str, str]]:
    """All chains of one addition: `a3b+1=` is completed with `a3b+14$`."""
    return [
        (f"a{start}b+{more}=", f"a{start}b+{more}{start + more}$")
        for more in (1, 2, 3)
        for start in range(10)
        if start + more < 10
    ]


if __name__ == "__main__":
    result = Pipeline(
        model=sys.argv[1] if len(sys.argv) > 1 else WarmStart(steps=100),
        prompts=MixTask(
            sources={
                "additions": Source(task=PythonTask(function=f"{__file__}:table", held_out=0.2), weight=1),
                "chains": Source(task=ChainsTask(median_size=4), weight=3),
            }
        ),
        curriculum={"band": [0.1, 0.9], "replay": 0.5},
        steps=6,
        rollout={"group_size": 4, "max_tokens": 64},
        flow={"groups_per_step": 8, "groups_per_take": 2},
        evaluation={"prompts": 16},
    ).run()
    with open_run(result.directory) as run:
        print(run.sql(READY["prompts_by_source"].sql))
