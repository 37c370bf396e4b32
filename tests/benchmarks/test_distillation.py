"""What the comparison of a student with its teacher runs and says, by hand; every night, that a student reaches one."""

from pathlib import Path

import pytest

from asyncrl.config.distillation import Distillation
from benchmarks import distillation
from benchmarks.distillation import WHOLE, Compared, Score, Student
from benchmarks.runs import Point, reached
from pipelines.compose import compose


def test_the_runs_differ_in_who_teaches_and_are_evaluated_after_equally_many_samples() -> None:
    options = distillation.parse(["max_staleness=1", "--steps", "40"])
    rewards, sampled, whole = (
        compose([*distillation.common(options), *settings])
        for settings in distillation.arms(Path("big"), options).values()
    )
    runs = rewards, sampled, whole
    assert [run.samples_per_step for run in runs] == [256, 256, 64] == list(distillation.PER_STEP.values())
    assert [run.samples_per_step * run.steps for run in runs] == [10_240, 5_120, 5_120]
    assert [run.evaluation.every * run.samples_per_step for run in runs] == [3840] * 3
    assert {(run.max_staleness, run.evaluation.prompts) for run in runs} == {(1, 1024)}
    assert (sampled.distill, whole.distill) == (Distillation(), Distillation(top_k=41))
    assert (rewards.teachers, sampled.teachers, whole.teachers[0].path) == ((), whole.teachers, "big")
    assert [run.learns_from_rewards for run in runs] == [True, False, False]
    only = distillation.parse(["--only", WHOLE])
    assert list(distillation.arms(Path("big"), only)) == [WHOLE]


def test_the_table_counts_to_the_teacher_less_three_points() -> None:
    slow = Student([Point(0, 0.0, 0.2), Point(1000, 9.0, 0.4)], Score(0.4, 0.03))
    fast = Student([Point(0, 0.0, 0.2), Point(1000, 9.0, 0.97)], Score(0.97, 0.03))
    found = {4: Compared(Score(0.9, 0.04), {"rewards": slow, "teacher alone": fast})}
    lines = distillation.table(found, 3.0).splitlines()
    assert lines[0] == "| seed | teacher | rewards | teacher alone |"
    assert lines[1] == "|---|---|---|---|"
    assert lines[2] == (
        "| 4 | 0.900 ± 0.040 | 0.200 -> 0.400 ± 0.030 (-50.0 ± 5.0 points), never in 1,000 samples | "
        "0.200 -> 0.970 ± 0.030 (+7.0 ± 5.0 points), 870 samples |"
    )


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_student_reaches_the_quickstarts_model_within_three_points(tmp_path: Path) -> None:
    """With half the samples after which rewards alone have it 35 points behind (docs/distillation.md)."""
    options = distillation.parse(["cluster=inprocess", "--seeds", "0", "--only", WHOLE, "--root", str(tmp_path)])
    found = distillation.study(options)[0]
    student = found.arms[WHOLE]
    assert student.points[0].held_out < 0.4
    assert reached(student.points, found.teacher.value - 0.03) is not None
    assert student.last.value > found.teacher.value - 0.03
    assert student.points[-1].samples == 15_360
