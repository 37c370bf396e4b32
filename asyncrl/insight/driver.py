"""Whether the process that drives a run is alive, as its directory tells and without touching it."""

import os
from pathlib import Path

import msgspec

from asyncrl.stalls import processes

CLOCK_S = 2.0
"""Between the clock of processes and that of files."""


def driver_of(roster: Path) -> tuple[int, bool]:
    """Its process id, and whether it runs on this machine. `roster` is written when the actors are placed."""
    driver = int(msgspec.json.decode(roster.read_bytes())["driver"])
    return driver, _is_alive(driver, roster.stat().st_mtime)


def _is_alive(pid: int, noted: float) -> bool:
    """Whether it is the process that was noted then, and no later one that got its number."""
    if processes.state(pid) == "ended":
        return False
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    except OSError:  # no Linux
        return True
    begun = int(boot.split()[1]) + int(stat[19]) / os.sysconf("SC_CLK_TCK")
    return begun <= noted + CLOCK_S
