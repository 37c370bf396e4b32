"""Every correction on the same task, off-policy enough to hurt: held-out accuracy against the synchronous run.

    python -m benchmarks.corrections [--seeds 0 1 2] [--only naive none] [--steps 150] [--jobs 1]
        [--root runs/corrections]

The quickstart at max_staleness=4 and lr 1e-3. Finished runs are kept (`benchmarks.studies`).
"""

import argparse
from pathlib import Path
from statistics import mean

from benchmarks.studies import Study, add_options, against

PRESETS = Path(__file__).parents[1] / "configs" / "correction"
NOT_A_PRESET = {"custom", "importance"}
STALENESS, LR, HELD_OUT = 4, 1e-3, 1024


def presets() -> list[str]:
    return sorted({path.stem for path in PRESETS.glob("*.yaml")} - NOT_A_PRESET)


def table(study: Study, names: list[str], seeds: list[int]) -> str:
    lines = [f"| correction | {' | '.join(f'seed {s}' for s in seeds)} | mean | lowest on the way | against sync |"]
    lines.append("|---" * (len(seeds) + 4) + "|")
    reference: float | None = None
    for name in names:
        scores = {
            seed: [found["evaluations"][step]["sampled"] for step in sorted(found["evaluations"], key=int)]
            for seed, found in study.finished(name, seeds).items()
        }
        if not scores:
            continue
        average = mean(values[-1] for values in scores.values())
        cells = [f"{scores[seed][-1]:.3f}" if seed in scores else "-" for seed in seeds]
        lowest = min(value for values in scores.values() for value in values[1:])
        lines.append(f"| {name} | {' | '.join(cells)} | {average:.3f} | {lowest:.3f} | {against(average, reference)} |")
        reference = average if name == "sync" else reference
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "runs/corrections")
    parser.add_argument("--only", nargs="+", choices=presets(), default=presets(), metavar="PRESET")
    options = parser.parse_args()
    study = Study(options.root, steps=options.steps)
    study.start(options.seeds)
    common = [
        *("experiment=quickstart", f"trainer.lr={LR}", f"steps={options.steps}", "evaluation.every=50"),
        *(f"evaluation.prompts={HELD_OUT}", "checkpoint.every=0", "sentinel.max_kl=0"),
    ]
    arms = {"sync": ["max_staleness=0"]}
    arms |= {name: [f"max_staleness={STALENESS}", f"correction={name}"] for name in options.only}
    study.run(arms, options.seeds, common, options.jobs)
    print(table(study, ["sync", *presets()], options.seeds))


if __name__ == "__main__":
    main()
