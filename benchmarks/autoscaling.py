"""A run on a cluster that begins with one node, grows to three while the trainer waits, and shrinks to one again when
the engines do: the real pipeline, Ray's real autoscaler in both generations, nodes as processes of this machine.

    python -m benchmarks.autoscaling [--version 1 2]

Engines are fake ones that decode eight answers at a time at a fixed pace, so that three of them are three times as
fast as one whatever this machine has to do besides. After some seconds with three nodes the trainer is made slow.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from asyncrl.buffer.reader import read_run
from asyncrl.system.run_directory import read_events
from benchmarks.fake_nodes import NodeCount, autoscaling_ray
from benchmarks.phases import SLOW
from benchmarks.runs import HERE
from pipelines.cli.check import check

NODES = 3
LIMIT_S = 90.0
STEADY_S = 8.0
TIMEOUT_S = 300.0
SETTINGS = (
    *("experiment=quickstart", "steps=120", "name=run", "model.steps=1", "evaluation.prompts=0", "checkpoint.every=0"),
    *("engine=fake", "engine.max_batch=8", "engine.step_seconds=0.02", "engine.vocabulary=32", "engine.sigma=0.3"),
    *("rollout.group_size=4", "rollout.max_tokens=80", "flow.groups_per_step=4", "flow.groups_per_take=4"),
    *("algorithm=custom", "algorithm.function=benchmarks.phases:loss", "reward.function=benchmarks.phases:reward"),
    *("correction=none", "sentinel.max_kl=0", "weights.probe=false", "max_staleness=2"),
    *("elastic.max=3", "elastic.interval_s=1", "elastic.window=2", "elastic.cooldown_s=2", "elastic.join_timeout_s=60"),
)


class Result(NamedTuple):
    version: int
    up_s: float
    """From the first decision to grow until there are three nodes with an engine that serves on each."""
    down_s: float
    """From the trainer's becoming slow until one node is left."""
    one: float
    """Trajectories per second with one engine, and with all."""
    three: float
    handed_over: int
    """Samples that engines had under way when they were told to leave."""
    lost: int
    sound: bool

    @property
    def held(self) -> bool:
        quick = self.up_s + self.down_s <= LIMIT_S
        return quick and self.sound and not self.lost and self.three > 1.5 * self.one


def measure(version: int, place: Path) -> Result:
    """One run under an autoscaler of this generation."""
    slow, node = place / "slow", {"CPU": 1.0, "rollout_slot": 1.0}
    with (
        autoscaling_ray(
            place,
            version=version,
            head={**node, "CPU": 2.0},
            worker=node,
            workers=NODES - 1,
            variables={SLOW: str(slow)},
        ) as (address, environment),
        (place / "output.txt").open("w") as output,
    ):
        count = NodeCount(address, environment)
        command = [*HERE, "run", *SETTINGS, f"cluster={address}", f"root={place}"]
        run = subprocess.Popen(command, env=environment, cwd=place, stdout=output, stderr=subprocess.STDOUT)
        try:
            slowed, shrunk = _drive(run, count, place / "run", slow)
            run.wait(TIMEOUT_S)
        finally:
            run.kill()
            run.wait()
            count.close()
    return _result(version, place / "run", count, slowed, shrunk)


def _drive(run: "subprocess.Popen[bytes]", count: NodeCount, directory: Path, slow: Path) -> tuple[float, float]:
    """Make the trainer slow when all engines have worked for a while; when that was, and when one node was left."""
    _until(run, lambda: count.now == NODES and len(_joined(directory)) == NODES - 1, f"{NODES} nodes")
    time.sleep(STEADY_S)
    slow.touch()
    slowed = time.time()
    _until(run, lambda: count.now == 1, "one node")
    return slowed, time.time()


def _joined(directory: Path) -> list[float]:
    """When further engines began to serve."""
    events = read_events(directory / "events.jsonl")
    return sorted(event["time"] + event["seconds"] for event in events if event["kind"] == "engine_joined")


def _until(run: "subprocess.Popen[bytes]", reached: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not reached():
        if run.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the run did not come to {what}: exit code {run.poll()}")
        time.sleep(0.25)


def _result(version: int, directory: Path, count: NodeCount, slowed: float, shrunk: float) -> Result:
    events = read_events(directory / "events.jsonl")
    joined = _joined(directory)
    finished = sorted(trajectory.finished for trajectory in read_run(directory / "trajectories"))
    summary = json.loads((directory / "summary.json").read_text())
    return Result(
        version=version,
        up_s=joined[NODES - 2] - next(event["time"] for event in events if event["kind"] == "pool_resized"),
        down_s=shrunk - slowed,
        one=_rate(finished, finished[0], joined[0]),
        three=_rate(finished, joined[NODES - 2], slowed),
        handed_over=sum(event["samples"] for event in events if event["kind"] == "engine_draining"),
        lost=sum(summary["ledger"]["dropped"].values()),
        sound=summary["status"] == "ok" and check(directory).sound,
    )


def _rate(finished: Sequence[float], begin: float, end: float) -> float:
    return sum(begin < at <= end for at in finished) / (end - begin)


def table(results: Sequence[Result]) -> Table:
    found = Table("autoscaler", "1 -> 3 nodes", "3 -> 1 nodes", "one engine", "three", "handed over", "lost", "check")
    for each in results:
        found.add_row(
            f"v{each.version}",
            f"{each.up_s:.1f} s",
            f"{each.down_s:.1f} s",
            f"{each.one:.1f}/s",
            f"{each.three:.1f}/s ({each.three / each.one:.1f}x)",
            str(each.handed_over),
            str(each.lost),
            "sound" if each.sound else "NOT SOUND",
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--version", type=int, nargs="*", choices=(1, 2), default=(1, 2))
    parser.add_argument("--keep", action="store_true", help="leave the run directories")
    options = parser.parse_args()
    results: list[Result] = []
    for version in options.version:
        place = Path(tempfile.mkdtemp(prefix="ar-", dir="/tmp"))
        results.append(measure(version, place))
        if options.keep:
            print(place)
        else:
            shutil.rmtree(place, ignore_errors=True)
    Console(width=120).print(table(results))
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    held = all(each.held for each in results)
    print(f"bar (both ways within {LIMIT_S:g} s, nothing lost, throughput rises): {'held' if held else 'NOT held'}")
    return not held


if __name__ == "__main__":
    sys.exit(main())
