"""What the comparison of a student with its teacher runs and says, by hand."""

from pathlib import Path

import msgspec

from asyncrl.config.distillation import Distillation
from benchmarks import distillation
from benchmarks.distillation import Compared
from benchmarks.runs import Point
from pipelines.compose import compose


def test_the_runs_have_the_same_samples_and_differ_in_who_teaches() -> None:
    options = distillation.parse(["max_staleness=1", "--steps", "30"])
    rewards, taught, likeliest = (
        compose([*distillation.common(options), *settings]) for settings in distillation.arms(Path("big")).values()
    )
    assert rewards.samples_per_step == taught.samples_per_step == 256
    assert likeliest == msgspec.structs.replace(taught, distill=Distillation(top_k=16))
    assert (rewards.steps, rewards.max_staleness) == (taught.steps, taught.max_staleness) == (30, 1)
    assert (rewards.teachers, taught.teachers[0].path) == ((), "big")
    assert rewards.learns_from_rewards
    assert not taught.learns_from_rewards


def test_the_table_counts_to_the_teacher_less_three_points() -> None:
    slow = [Point(0, 0.0, 0.2), Point(1000, 9.0, 0.4)]
    fast = [Point(0, 0.0, 0.2), Point(1000, 9.0, 0.97)]
    lines = distillation.table({4: Compared(0.9, {"rewards": slow, "teacher alone": fast})}, 3.0).splitlines()
    assert lines[0] == "| seed | teacher | rewards | teacher alone |"
    assert lines[2] == "| 4 | 0.900 | 0.200 -> 0.400, never in 1,000 samples | 0.200 -> 0.970, 870 samples |"
