"""A run that is asked to end: with SIGTERM, as schedulers do, with SIGINT (Ctrl-C), or by its cluster.

The first signal lets the run end by itself: it takes no new step, writes a checkpoint and closes its actors. What has
not ended within `recovery.grace_s` is ended with the process. A second signal ends the process at once. One that comes
within `SAME_S` of the first is the same: who signals every process of a service reaches the run directly and through
its supervisor. What the cluster says is no signal.
"""

import asyncio
import math
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, TypeVar

from asyncrl.config import Run
from asyncrl.errors import ActorError, StoppedError
from pipelines.supervision.supervisor import SIGNALS, leave

T = TypeVar("T")
INTERRUPTED = 130
"""Exit code after a second signal, and of a run in a thread, where no signal arrives."""
SAME_S = 1.0

_ENDED_BY = StoppedError, KeyboardInterrupt, SystemExit, asyncio.CancelledError, ActorError
"""What a run ends with that is asked to; an actor may have got the signal, too."""


class Stopping:
    def __init__(self, run: Run, say: Callable[[str], None], at_exit: Callable[[str], object]) -> None:
        """`at_exit` gets the reason before the process is ended with `os._exit`."""
        self._grace_s, self._say, self._at_exit = run.recovery.grace_s, say, at_exit
        self.reason = ""
        """The signal, or what the cluster said; empty until then."""
        self._first = math.inf
        """When the first signal came."""
        self._over = False
        """There is nothing left to save."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked = asyncio.Event()

    @contextmanager
    def listening(self) -> Generator["Stopping", None, None]:
        """Signals of this process mean the run, if this is the thread that they arrive in."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        self.listen()
        try:
            yield self
        finally:
            self.over()
            if _in_main_thread():
                for number, handler in before.items():
                    signal.signal(number, handler)

    def listen(self) -> None:
        """Again once Ray is up, which puts its own handler in the place of any other."""
        if _in_main_thread():
            for number in SIGNALS:
                signal.signal(number, self._signalled)

    def over(self) -> None:
        """The run is complete: what is left is to close what it has used."""
        self._over = True

    def explains(self, error: BaseException) -> bool:
        """Whether the run ends with this error because it was asked to end."""
        if isinstance(error, SystemExit):  # the handler that Ray has while it starts
            self.reason = self.reason or signal.SIGTERM.name
        return bool(self.reason) and isinstance(error, _ENDED_BY)

    def _signalled(self, number: int, _: FrameType | None) -> None:
        if self._over:
            return
        now = time.monotonic()
        if now > self._first + SAME_S:
            self._exit(f"ended at once by a second signal, {signal.Signals(number).name}", INTERRUPTED)
        self._first = min(self._first, now)
        if self.reason:
            self._say(f"{signal.Signals(number).name}: the run ends already; a second signal ends it at once")
            return
        self.ask(signal.Signals(number).name)
        if self._loop is None:
            raise KeyboardInterrupt(self.reason)

    def ask(self, reason: str, within_s: float | None = None) -> None:
        """Let the run end by itself, sooner than `recovery.grace_s` if there is less time."""
        self.reason = reason
        grace_s = self._grace_s if within_s is None else min(self._grace_s, max(0.0, within_s))
        self._say(
            f"{reason}: the run writes a checkpoint and ends, within {grace_s:.3g} s (recovery.grace_s); "
            "a second signal ends it at once"
        )
        late = threading.Timer(grace_s, self._late)
        late.daemon = True
        late.start()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._asked.set)

    def _late(self) -> None:
        if not self._over:
            said = f"{self.reason}: not everything ended within recovery.grace_s={self._grace_s:g}"
            self._exit(said, StoppedError.exit_code)

    def _exit(self, reason: str, code: int) -> NoReturn:
        leave(reason, code, lambda: self._at_exit(reason))

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """From here on a signal raises nothing by itself: the run looks for it with `unless`."""
        self._loop, self._asked = asyncio.get_running_loop(), asyncio.Event()  # an event belongs to one loop
        try:
            return await work
        finally:
            self._loop = None

    async def unless(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result; StoppedError, and `work` is cancelled, if a signal comes first."""
        if self._asked.is_set():
            work.close()
            raise StoppedError(self.reason)
        task, asked = asyncio.create_task(work), asyncio.create_task(self._asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise StoppedError(self.reason)
        finally:
            asked.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
