"""Whether the process that drives a run is alive, as its directory tells and without touching it."""

from pathlib import Path

import msgspec

from asyncrl.stalls import processes


def driver_of(roster: Path) -> tuple[int, bool]:
    """Its process id, and whether it runs on this machine. `roster` is written when the actors are placed."""
    driver = int(msgspec.json.decode(roster.read_bytes())["driver"])
    return driver, processes.is_still(driver, roster.stat().st_mtime)
