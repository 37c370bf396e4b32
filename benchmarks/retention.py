"""Whether anything grows with the age of a run: disk, memory of every process, time of a step, time to resume.

    python -m benchmarks.retention [--steps 2000] [--keep steps:50] [--root /tmp/retention] [override ...]

One quickstart run on a local Ray with `buffer.keep`. It is stopped with SIGTERM and resumed after a tenth of its steps
and shortly before its end. Printed are the medians of ten equal parts of the run; everything after the first tenth
should be flat. Events are bounded at 1 MB here, so that a run of minutes comes to that bound.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow.parquet

from asyncrl.system import ownership

COMMAND = str(Path(sys.executable).with_name("asyncrl"))
PARTS = 10
LOOK_S = 2.0
OTHERS = {"gcs_server": "Ray's control process", "raylet": "Ray's scheduler"}


class Looks:
    """What was seen of the run's processes and files, by step."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self.seen: list[tuple[int, dict[str, float]]] = []

    def look(self, step: int) -> None:
        found = {"disk": sum(file.stat().st_size for file in _files(self._run)) / 1e6}
        roles = {pid: role for role, pid in json.loads((self._run / "actors.json").read_text()).items()}
        for process in psutil.process_iter(["name"]):
            role = roles.get(process.pid)
            with suppress(psutil.Error):
                if role is None and ownership.MARK in process.environ():
                    role = OTHERS.get(process.info["name"])
                if role is not None:
                    found[role] = process.memory_info().rss / 1e6
        self.seen.append((step, found))

    def medians(self, steps: int) -> Iterator[dict[str, float]]:
        for part in range(PARTS):
            inside = [found for step, found in self.seen if part * steps <= PARTS * step < (part + 1) * steps]
            names = {name for found in inside for name in found}
            yield {name: statistics.median(found[name] for found in inside if name in found) for name in names}


def _files(run: Path) -> list[Path]:
    return [path for path in run.rglob("*") if path.is_file()]


def _step(run: Path) -> int:
    """The last one that the events tell of."""
    try:
        with (run / "events.jsonl").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            updates = [line for line in file.read().splitlines() if b'"kind":"update"' in line and line.endswith(b"}")]
        return int(json.loads(updates[-1])["step"]) if updates else 0
    except (FileNotFoundError, ValueError):
        return 0


def _until(process: "subprocess.Popen[bytes]", run: Path, step: int, looks: Looks | None = None) -> None:
    looked = 0.0
    while (now := _step(run)) < step:
        if process.poll() is not None:
            raise SystemExit(f"the run ended with {process.returncode} at step {now}")
        if looks is not None and time.monotonic() - looked > LOOK_S and (run / "actors.json").exists():
            looks.look(now)
            looked = time.monotonic()
        time.sleep(0.05)


def _row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--keep", default="steps:50")
    parser.add_argument("--root", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    root = options.root or Path(tempfile.mkdtemp(prefix="retention-"))
    run, steps = root / "run", options.steps
    words = ["experiment=quickstart", f"root={root}", "name=run", f"steps={steps}", "cluster=local"]
    words += [f"buffer.keep={options.keep}", "events.max_bytes=1000000", "evaluation.prompts=0", *options.overrides]
    looks = Looks(run)
    with (root / "output").open("ab") as output:

        def start(*command: str) -> "subprocess.Popen[bytes]":
            return subprocess.Popen([COMMAND, *command], stdout=output, stderr=output)

        process = start("run", *words)
        resumed: dict[int, float] = {}
        for stop in (steps // PARTS, steps - 10):
            _until(process, run, stop, looks)
            process.send_signal(signal.SIGTERM)
            if (code := process.wait(timeout=120)) != 10:
                raise SystemExit(f"stopping at step {stop} ended with {code}: {root / 'output'}")
            before, began = _step(run), time.monotonic()
            process = start("resume", str(run))
            _until(process, run, before + 1)
            resumed[before] = time.monotonic() - began
        if code := process.wait(timeout=600):
            raise SystemExit(f"the run ended with {code}: {root / 'output'}")
    columns = pyarrow.parquet.read_table(run / "metrics.parquet", columns=["step", "time"]).to_pydict()
    times = dict(zip(columns["step"], columns["time"], strict=True))
    medians = list(looks.medians(steps))
    names = sorted({name for found in medians for name in found})
    _row("from step", "s a step", *(f"{name} MB" for name in names))
    _row(*["---:"] * (2 + len(names)))
    for part, found in enumerate(medians):
        inside = [step for step in times if step - 1 in times and part * steps <= PARTS * step < (part + 1) * steps]
        seconds = statistics.median(times[step] - times[step - 1] for step in inside)
        cells = [f"{found[name]:.0f}" if name in found else "" for name in names]
        _row(str(part * steps // PARTS), f"{seconds:.3f}", *cells)
    print("resumed, to the first new step: " + ", ".join(f"after step {at}: {s:.1f} s" for at, s in resumed.items()))
    subprocess.run([COMMAND, "check", str(run)], check=True)


if __name__ == "__main__":
    main()
