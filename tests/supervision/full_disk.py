"""Runs on a disk that is really full: python -m tests.supervision.full_disk DIRECTORY MODEL CASES, inside a mount
namespace of its own (`test_full_disk.py`), writes `facts.json` into the directory."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

COMMAND = str(Path(sys.executable).with_name("asyncrl"))
SMALL = (
    "experiment=quickstart", "flow.groups_per_step=4", "flow.groups_per_take=1", "rollout.group_size=4",
    "rollout.max_tokens=24", "evaluation.prompts=0", "steps=60",
)  # fmt: skip
DISK = 48 << 20


def main(directory: Path, model: Path, cases: list[tuple[int, int, list[str]]]) -> None:
    disk = directory / "disk"
    facts: list[dict[str, Any]] = []
    for number, (steps, room, words) in enumerate(cases):
        disk.mkdir(exist_ok=True)
        run("mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk))
        output = directory / f"output-{number}"
        facts.append(one(disk, output, steps, room, [word.replace("MODEL", str(model)) for word in words]))
        run("umount", str(disk))
    (directory / "facts.json").write_text(json.dumps(facts))


def run(*words: str) -> None:
    subprocess.run(words, check=True)


def one(disk: Path, output: Path, steps: int, room: int, words: list[str]) -> dict[str, Any]:
    run, ballast = disk / "runs" / "run", disk / "ballast"
    with output.open("ab") as out:

        def command(*words: str) -> "subprocess.Popen[bytes]":
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            return subprocess.Popen([COMMAND, *words], stdout=out, stderr=out, env=environment)

        if not steps:
            fill(disk, ballast, room)
        process = command("run", *SMALL, f"root={disk / 'runs'}", "name=run", *words)
        if steps:
            until_steps(process, run, steps)
            fill(disk, ballast, room)
        code = process.wait(timeout=200)
        said = output.read_text().strip().splitlines()[-1]
        ballast.unlink()
        begun = (run / "config.yaml").exists()
        again = command("resume", str(run)) if begun else None
        return {
            "code": code,
            "said": said,
            "traceback": "Traceback" in output.read_text(),
            "begun": begun,
            "resumed": again.wait(timeout=200) if again else None,
            "sound": command("check", str(run)).wait(timeout=60) if again else None,
            "output": output.read_text()[-3000:],
        }


def until_steps(process: "subprocess.Popen[bytes]", run: Path, steps: int) -> None:
    events = run / "events.jsonl"
    while process.poll() is None and not (events.exists() and events.read_text().count('"kind":"update"') >= steps):
        time.sleep(0.02)


def fill(disk: Path, ballast: Path, room: int) -> None:
    """All but so many bytes, while a run takes some of them."""
    with ballast.open("wb") as file:
        while True:
            free = os.statvfs(disk)
            with suppress(OSError):
                size = max(1, os.fstat(file.fileno()).st_size + free.f_bavail * free.f_bsize - room)
                os.posix_fallocate(file.fileno(), 0, size)
                return


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
