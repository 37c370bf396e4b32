"""The processes of one run, found from outside it: by its directory, and by a mark in their environment. Linux only."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from asyncrl.rundir import RunDirectory

MARK = "ASYNCRL_CHAOS"
"""Environment variable of the driver and so of every process that comes from it; its value is the run directory."""
CLASSES = {"buffer": "BufferActor", "reward": "RewardActor", "trainer": "TrainerActor", "drafter": "DrafterActor"}
RAYS_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""They hold nothing of ours, and end by themselves a minute after the head node that died with the driver."""


class Processes:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.environment = {MARK: str(directory)}

    def of(self, role: str) -> int | None:
        """The living process of a role: as the driver wrote it down, or, made anew since, by its title."""
        path = RunDirectory(self._directory).actors
        known: dict[str, int] = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
        titles = dict(self._living())
        if known.get(role) in titles:
            return known[role]
        title = f"ray::{CLASSES.get(role.split('-')[0], 'RolloutActor')}"
        return next((pid for pid, text in titles.items() if text.startswith(title)), None)

    def end(self, timeout_s: float) -> None:
        """Wait until none is left; whoever outlives its driver by `timeout_s` is killed."""
        end = time.monotonic() + timeout_s
        while left := [pid for pid, title in self._living() if not title.startswith(RAYS_AGENTS)]:
            if time.monotonic() > end:
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def _living(self) -> Iterator[tuple[int, str]]:
        """Process ids and titles."""
        mark = f"{MARK}={self._directory}\0".encode()
        for process in Path("/proc").iterdir():
            if not process.name.isdigit() or int(process.name) == os.getpid():
                continue
            with suppress(OSError):  # it ended while we looked, or belongs to somebody else
                if mark in (process / "environ").read_bytes():
                    yield int(process.name), (process / "cmdline").read_bytes().decode(errors="replace")
