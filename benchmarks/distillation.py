"""Does a student reach its teacher, and in fewer samples than by rewards alone?

    python -m benchmarks.distillation                     three seeds; an hour on two cores
    python -m benchmarks.distillation --seeds 0 --steps 60 --jobs 1

The teacher is the quickstart's model after its run: a warm start of 800 steps, then rewards. The student is a smaller
model with a shorter warm start. It is trained three times from there with equally many samples a step: by rewards
alone, with the quickstart's settings; by the teacher alone (`distill.reward=0`, groups of one, a learning rate of its
own), which judges the sampled tokens; and by the same teacher over its likeliest tokens (`distill.top_k`).
Each is evaluated on the same held-out prompts as the teacher was.
Samples are counted to the first held-out score within `--points` of the teacher's. Finished runs are kept
(`benchmarks.studies`).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from asyncrl.config import WarmStart
from asyncrl.config.task import ChainsTask
from asyncrl.training.warm_start import make_model
from benchmarks.runs import Point, curve, reached
from benchmarks.studies import Study, add_options

TEACHER, REWARDS, TAUGHT = "teacher", "rewards", "teacher alone"
TOP_K = 16
"""Of the 41 tokens of the quickstart."""
LIKELIEST = f"top {TOP_K} of the teacher"
TEACHER_STEPS = 150


class Compared(NamedTuple):
    """One seed."""

    teacher: float
    arms: dict[str, list[Point]]


def row(seed: int, found: Compared, points: float) -> str:
    """A line of the table."""
    goal = found.teacher - points / 100
    cells: list[str] = []
    for curve_of in found.arms.values():
        hit = reached(curve_of, goal)
        samples = f"{hit.samples:,} samples" if hit is not None else f"never in {curve_of[-1].samples:,} samples"
        cells.append(f"{curve_of[0].held_out:.3f} -> {curve_of[-1].held_out:.3f}, {samples}")
    return f"| {seed} | {found.teacher:.3f} | {' | '.join(cells)} |"


def table(found: dict[int, Compared], points: float) -> str:
    arms = " | ".join(next(iter(found.values())).arms)
    head = [f"| seed | teacher | {arms} |", "|---|---|---|---|"]
    return "\n".join([*head, *(row(seed, each, points) for seed, each in found.items())])


def arms(teacher: Path) -> dict[str, list[str]]:
    """As many samples a step in all. What a teacher says of every token is less noisy than a reward, so that steps may
    be larger."""
    size = "rollout.group_size=1", "flow.groups_per_step=256", "flow.groups_per_take=32"
    rate = "trainer.lr=1e-3", "trainer.warmup_steps=3"
    taught = [f"teachers=[{{path: {teacher}}}]", *size, *rate]
    return {REWARDS: [], TAUGHT: taught, LIKELIEST: [*taught, f"distill.top_k={TOP_K}"]}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="for all runs of the student")
    add_options(parser, "runs/distillation")
    parser.add_argument("--every", type=int, default=10, help="steps between two evaluations")
    parser.add_argument("--prompts", type=int, default=512, help="of an evaluation")
    parser.add_argument("--points", type=float, default=3.0, help="that the student may be behind the teacher")
    parser.add_argument("--warm", type=int, default=300, help="steps of the student's warm start")
    parser.add_argument("--hidden", type=int, default=96, help="size of the student; the teacher's is 128")
    return parser.parse_intermixed_args(words)


def common(options: argparse.Namespace) -> list[str]:
    evaluation = [f"evaluation.every={options.every}", f"evaluation.prompts={options.prompts}"]
    rest = ["checkpoint.every=0", "sentinel.max_kl=0", *options.settings]
    return ["experiment=quickstart", "engine=native", f"steps={options.steps}", *evaluation, *rest]


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
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
    for seed, summary in teachers.finished(TEACHER, options.seeds).items():
        checkpoint = teachers.directory(TEACHER, seed) / "checkpoints" / f"step-{TEACHER_STEPS}"
        wanted = arms(checkpoint)
        students.run(wanted, [seed], common(options), options.jobs)
        curves = {
            arm: curve(students.directory(arm, seed), options.every) for arm in wanted if students.finished(arm, [seed])
        }
        if len(curves) == len(wanted):
            found[seed] = Compared(summary["eval_last"], curves)
    if found:
        print(table(found, options.points))


if __name__ == "__main__":
    main()
