"""Ray's own processes on this machine: without them a run ends, at once and with a sentence.

Left to itself, Ray tries for a minute to reach its control process and then ends the driver without a word.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

import psutil

NAMES = {"gcs_server": "control process", "raylet": "scheduler"}
"""Of processes that we start. Their agents are the scheduler's, which ends with them."""
LOOK_S = 0.5


@contextmanager
def watching_ray(lost: Callable[[str], None]) -> Generator[None, None, None]:
    """Call `lost`, in a thread, with a sentence when one of them dies; a Ray that others started has none here."""
    found = {process: NAMES[name] for process in psutil.Process().children() if (name := _name(process)) in NAMES}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_S):
            for process, what in found.items():
                if not _lives(process) and not over.is_set():
                    lost(f"Ray's {what} ({process.pid}) died, and with it everything that runs on Ray")
                    return

    if found:
        threading.Thread(target=watch, name="ray-watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.name()
    return ""


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
