"""What it costs to record a run: the quickstart with its recorder metered, against 2 % of its time.

    python -m benchmarks.recording [--steps 60] [--off]

Everything runs in this process. Metered is all of the recorder: the row of each step with the questions to engines,
buffer and reward that it is made of, events and spans, progress lines, metrics.parquet. The time in which it runs,
which nothing else of the driver's loop does meanwhile, is compared with the time of the loop. The trajectories are
not recording: they are what makes a run durable.

`--off` runs a second time without writing events and metrics, and prints samples/s of both. On a machine that other
processes share, two runs differ by more than 2 % whatever is recorded, so no verdict hangs on that.
"""

import argparse
import inspect
import json
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from pipelines.compose import compose
from pipelines.recording.recorder import Recorder
from pipelines.train import train

BAR = 0.02
METHODS = ("event", "span", "step", "evaluation", "write_metrics", "close")


class Meter:
    """CPU and wall seconds spent inside of methods, those that they call counted once."""

    def __init__(self) -> None:
        self.cpu = self.wall = 0.0
        self.calls = 0
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._cpu, self._wall = time.thread_time(), time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.cpu += time.thread_time() - self._cpu
            self.wall += time.perf_counter() - self._wall

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):

            async def metered_steps(*args: Any, **kwargs: Any) -> Any:
                return await _Steps(function(*args, **kwargs), self)

            return metered_steps

        def metered(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            with self:
                return function(*args, **kwargs)

        return metered


class _Steps:
    """A coroutine that is metered while it runs, and not while it waits."""

    def __init__(self, coroutine: Any, meter: Meter) -> None:
        self._coroutine, self._meter = coroutine, meter

    def __await__(self) -> Generator[Any, Any, Any]:
        running = self._coroutine.__await__()
        while True:
            with self._meter:
                try:
                    waited_for = next(running)
                except StopIteration as end:
                    return end.value
            yield waited_for


def measure(steps: int, root: Path, name: str) -> dict[str, Any]:
    """The summary of the quickstart."""
    overrides = ("experiment=quickstart", "cluster=inprocess", "evaluation.every=0", f"steps={steps}")
    train(compose([*overrides, f"root={root}", f"name={name}"]))
    return json.loads((root / name / "summary.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, metavar="N")
    parser.add_argument("--off", action="store_true", help="once more, without writing")
    options = parser.parse_args()
    meter = Meter()
    originals = {method: getattr(Recorder, method) for method in METHODS}
    for method, original in originals.items():
        setattr(Recorder, method, meter.wrap(original))
    with tempfile.TemporaryDirectory() as root:
        on = measure(options.steps, Path(root), "on")
        loop = on["train_loop_seconds"]
        print(f"recorder: {meter.calls} calls, {meter.wall:.3f} s of the driver's time, {meter.cpu:.3f} s of CPU")
        print(f"run: {loop:.1f} s in the loop, {on['samples_per_second']:.0f} samples/s")
        share = meter.wall / loop
        print(f"recording: {share:.2%} of the loop, bar {BAR:.0%}: {'held' if share <= BAR else 'NOT held'}")
        if options.off:
            for method, original in originals.items():
                setattr(Recorder, method, original)
            for method in ("event", "span", "write_metrics"):
                setattr(Recorder, method, lambda *_, **__: None)
            off = measure(options.steps, Path(root), "off")
            print(f"samples/s: {on['samples_per_second']:.0f} recorded, {off['samples_per_second']:.0f} not written")


if __name__ == "__main__":
    main()
