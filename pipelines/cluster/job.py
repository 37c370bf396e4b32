"""On the head node: a run that outlives the connection that started it, with its log and its exit code.

python -m pipelines.cluster.job start NAME WORD ...     begin it; refused while one of that name runs
python -m pipelines.cluster.job follow NAME MARK        print MARK, its log until it ends, and MARK with its exit code
python -m pipelines.cluster.job stop NAME               interrupt it, as Ctrl-C does
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.system import processes
from asyncrl.system.run_directory import owner_only, replace

LOOK_SECONDS = 0.2
LOST = 1
"""Exit code of a run whose end nobody saw: the machine or the supervisor was killed."""


class Job:
    def __init__(self, name: str) -> None:
        self._directory = Path.home() / ".asyncrl" / "jobs" / name
        parts = ("log", "code", "supervisor", "process")
        self._log, self._code, self._supervisor, self._process = (self._directory / part for part in parts)

    def start(self, words: list[str]) -> None:
        if self._running():
            raise ConfigError(
                f"name={self._directory.name} runs already: follow it with --follow, or choose another name=..."
            )
        with owner_only():
            self._directory.mkdir(parents=True, exist_ok=True)
            for left in (self._code, self._process):
                left.unlink(missing_ok=True)
            self._log.write_bytes(b"")
            supervisor = [sys.executable, "-m", __spec__.name, "supervise", self._directory.name, *words]
            begun = subprocess.Popen(
                supervisor,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            replace(self._supervisor, str(begun.pid).encode())

    def supervise(self, words: list[str]) -> None:
        with owner_only(), self._log.open("ab") as log:
            run = subprocess.Popen(
                words, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
            replace(self._process, str(run.pid).encode())
            replace(self._code, str(run.wait()).encode())

    def follow(self, mark: str) -> None:
        print(mark, flush=True)
        with self._log.open(errors="replace") as log:
            code = None
            while code is None:
                code = self._ended()  # looked up before the log is read, so that nothing of it is missed
                print(log.read(), end="", flush=True)
                time.sleep(LOOK_SECONDS)
        print(f"\n{mark} {code}", flush=True)

    def stop(self) -> None:
        while self._running():
            if self._process.exists():  # at once after the supervisor's start
                with suppress(ProcessLookupError):  # it ended meanwhile
                    os.kill(int(self._process.read_text()), signal.SIGINT)
                return
            time.sleep(LOOK_SECONDS)

    def _ended(self) -> int | None:
        supervised = self._supervised()  # looked up first: the code is there before the supervisor ends
        if self._code.exists():
            return int(self._code.read_text())
        return None if supervised else LOST

    def _running(self) -> bool:
        return self._supervised() and not self._code.exists()

    def _supervised(self) -> bool:
        if not self._supervisor.exists():
            return False
        return processes.is_still(int(self._supervisor.read_text()), self._supervisor.stat().st_mtime)


def main(words: list[str]) -> None:
    verb, name, *rest = words
    job = Job(name)
    match verb:
        case "start":
            job.start(rest)
        case "supervise":
            job.supervise(rest)
        case "follow":
            job.follow(*rest)
        case _:
            job.stop()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"asyncrl: {error}")
