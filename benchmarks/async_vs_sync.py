"""Asynchronous (staleness 2) against synchronous (staleness 0): the same code, seed and samples, one after the other.

python -m benchmarks.async_vs_sync [--seed 0] [--steps N]
"""

import argparse

from benchmarks.runs import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    common = [f"seed={options.seed}"] + ([f"steps={options.steps}"] if options.steps else [])
    results = {staleness: run(f"max_staleness={staleness}", "evaluation.every=0", *common)[1] for staleness in (2, 0)}
    print(f"{'':16}{'samples':>9}{'samples/s':>11}{'tokens/s':>10}{'trainer waits':>15}{'held-out':>10}{'greedy':>8}")
    for staleness, summary in results.items():
        print(
            f"{f'max_staleness {staleness}':16}{summary['samples_trained']:>9}{summary['samples_per_second']:>11.0f}"
            f"{summary['generated_tokens_per_second']:>10,.0f}{summary['trainer_wait_fraction']:>15.0%}"
            f"{summary['eval_last']:>10.3f}{summary['eval_last_greedy']:>8.3f}"
        )
    ratio = results[2]["samples_per_second"] / results[0]["samples_per_second"]
    points = 100 * (results[2]["eval_last"] - results[0]["eval_last"])
    print(f"async / sync samples per second: {ratio:.2f}x; held-out difference {points:+.1f} points")


if __name__ == "__main__":
    main()
