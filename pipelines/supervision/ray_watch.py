"""What happens to the Ray that a run stands on.

Without its own processes on this machine a run ends, at once and with a sentence. A node that is about to be taken away
ends it as SIGTERM does, if it has what cannot be replaced while a run goes on; an engine that is lost is replaced.

Left to itself, Ray tries for a minute to reach its control process and then ends the driver without a word.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress

import psutil

from actors.fleet import Fleet
from actors.runtime.drain import drain_notice
from actors.trainer.group import ranks_of
from pipelines.supervision.stopping import Stopping

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


@asynccontextmanager
async def heeding_drains(cluster: str, fleet: Fleet, stopping: Stopping) -> AsyncGenerator[None, None]:
    """On a cluster that others have started; no node of our own is ever drained."""
    if cluster in ("inprocess", "local"):
        yield
        return

    async def heed() -> None:
        notice = await drain_notice({**fleet.unique, **ranks_of(fleet.trainer)})
        stopping.ask(f"the cluster drains node {notice.node} ({', '.join(notice.actors)})", notice.seconds)

    task = asyncio.create_task(heed())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.name()
    return ""


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
