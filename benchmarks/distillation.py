"""Does a student reach its teacher, and in fewer samples than by rewards alone?

    python -m benchmarks.distillation                     three seeds; an hour on two cores
    python -m benchmarks.distillation --seeds 0 --only rewards "the whole vocabulary"

The teacher is the quickstart's model after its run: a warm start of 800 steps, then rewards. The student is a smaller
model with a shorter warm start. It is trained from there by rewards alone, with the quickstart's settings; by the
teacher alone, which judges the sampled tokens; and by the same teacher over the whole vocabulary (`distill.top_k`).
By rewards it gets `--steps` of 256 samples, by a teacher half as many samples. Each is evaluated after as many samples
as the others, on the same held-out prompts as the teacher was, sampled.
Samples are counted to the first held-out score within `--points` of the teacher's. Behind scores stands half of their
95 % confidence interval. Finished runs are kept (`benchmarks.studies`).
"""

import argparse
from collections.abc import Sequence
from math import hypot
from pathlib import Path
from typing import NamedTuple

from asyncrl.config import WarmStart
from asyncrl.config.task import ChainsTask
from asyncrl.training.warm_start import make_model
from benchmarks.runs import Point, curve, reached
from benchmarks.studies import Study, add_options

TEACHER, REWARDS, SAMPLED, WHOLE = "teacher", "rewards", "sampled tokens", "the whole vocabulary"
VOCABULARY = 41
"""Tokens of the quickstart."""
PER_STEP = {REWARDS: 256, SAMPLED: 256, WHOLE: 64}
"""Samples."""
TEACHER_STEPS = 150


class Score(NamedTuple):
    value: float
    interval: float
    """Half the width of the 95 % confidence interval."""

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.interval:.3f}"


class Student(NamedTuple):
    """One run."""

    points: list[Point]
    last: Score


class Compared(NamedTuple):
    """One seed."""

    teacher: Score
    arms: dict[str, Student]


def row(seed: int, found: Compared, points: float) -> str:
    """A line of the table."""
    goal = found.teacher.value - points / 100
    cells: list[str] = []
    for student in found.arms.values():
        hit, last = reached(student.points, goal), student.points[-1]
        samples = f"{hit.samples:,} samples" if hit is not None else f"never in {last.samples:,} samples"
        first, ahead = student.points[0].held_out, 100 * (student.last.value - found.teacher.value)
        noise = 100 * hypot(student.last.interval, found.teacher.interval)
        cells.append(f"{first:.3f} -> {student.last} ({ahead:+.1f} ± {noise:.1f} points), {samples}")
    return f"| {seed} | {found.teacher} | {' | '.join(cells)} |"


def table(found: dict[int, Compared], points: float) -> str:
    arms = list(next(iter(found.values())).arms)
    head = [f"| seed | teacher | {' | '.join(arms)} |", f"|---|---{'|---' * len(arms)}|"]
    return "\n".join([*head, *(row(seed, each, points) for seed, each in found.items())])


def arms(teacher: Path, options: argparse.Namespace) -> dict[str, list[str]]:
    """Settings of each arm that was asked for. The teacher's part of a loss over the whole vocabulary has no noise of
    sampling, so that steps may be smaller and rates higher: with them the sampled tokens teach nothing."""
    taught = ["pipeline=distill", f"teachers=[{{path: {teacher}}}]", "trainer.warmup_steps=5"]
    own = {
        REWARDS: [],
        SAMPLED: [*taught, "distill.top_k=0", "flow.groups_per_step=256", "trainer.lr=1e-3"],
        WHOLE: [*taught, f"distill.top_k={VOCABULARY}", "flow.groups_per_step=64", "trainer.lr=3e-3"],
    }
    return {arm: [*own[arm], *length(arm, options)] for arm in own if arm in options.only}


def length(arm: str, options: argparse.Namespace) -> list[str]:
    """With a teacher half the samples. The rate falls over most of the run: large steps are fast and never exact."""
    if arm == REWARDS:
        steps, decay = options.steps, 0
    else:
        steps = options.steps * PER_STEP[REWARDS] // PER_STEP[arm] // 2
        decay = steps * 3 // 4
    return [f"steps={steps}", f"trainer.decay_steps={decay}", f"evaluation.every={every(arm, options)}"]


def every(arm: str, options: argparse.Namespace) -> int:
    """Steps between two evaluations."""
    return options.every // PER_STEP[arm]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="for all runs of the student")
    add_options(parser, "runs/distillation")
    parser.set_defaults(steps=120)  # by rewards
    parser.add_argument("--only", nargs="+", choices=list(PER_STEP), default=list(PER_STEP), metavar="ARM")
    parser.add_argument("--every", type=int, default=3840, help="samples between two evaluations")
    parser.add_argument("--prompts", type=int, default=1024, help="of an evaluation")
    parser.add_argument("--points", type=float, default=3.0, help="that the student may be behind the teacher")
    parser.add_argument("--warm", type=int, default=300, help="steps of the student's warm start")
    parser.add_argument("--hidden", type=int, default=96, help="size of the student; the teacher's is 128")
    return parser.parse_intermixed_args(words)


def common(options: argparse.Namespace) -> list[str]:
    rest = [f"evaluation.prompts={options.prompts}", "checkpoint.every=0", *options.settings]
    return ["experiment=quickstart", "engine=native", "sentinel.max_kl=0", *rest]


def study(options: argparse.Namespace) -> dict[int, Compared]:
    """By seed, where all runs are there."""
    of_teacher = ["experiment=quickstart", "engine=native", f"steps={TEACHER_STEPS}", "checkpoint.every=0"]
    of_teacher.append(f"evaluation.prompts={options.prompts}")
    teachers = Study(options.root / "teachers", common=of_teacher)
    teachers.start(options.seeds)
    teachers.run({TEACHER: []}, options.seeds, of_teacher, options.jobs)
    students = Study(options.root / "students", common=common(options), warm=options.warm, hidden=options.hidden)

    def student(path: Path, seed: int) -> None:
        shape = WarmStart(steps=options.warm, hidden_size=options.hidden, intermediate_size=2 * options.hidden)
        make_model(shape, ChainsTask(), seed, path)

    students.start(options.seeds, student)
    found: dict[int, Compared] = {}
    for seed in teachers.finished(TEACHER, options.seeds):
        checkpoint = teachers.directory(TEACHER, seed) / "checkpoints" / f"step-{TEACHER_STEPS}"
        wanted = arms(checkpoint, options)
        students.run(wanted, [seed], common(options), options.jobs)
        runs = {
            arm: Student(curve(students.directory(arm, seed), every(arm, options)), _last(students, arm, seed))
            for arm in wanted
            if students.finished(arm, [seed])
        }
        if len(runs) == len(wanted):
            found[seed] = Compared(_last(teachers, TEACHER, seed), runs)
    return found


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    if found := study(options):
        print(table(found, options.points))


def _last(study: Study, arm: str, seed: int) -> Score:
    """Of the last evaluation."""
    evaluations = study.finished(arm, [seed])[seed]["evaluations"]
    last = evaluations[max(evaluations, key=int)]
    return Score(last["sampled"], last["interval"])


if __name__ == "__main__":
    main()
