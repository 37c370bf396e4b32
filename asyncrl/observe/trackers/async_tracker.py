"""Keeps a tracker away from the run: its own thread, a bounded queue, a deadline at the end."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from asyncrl.observe.trackers.base import Tracker

WAITING = 1000
"""Calls that may wait for a slow tracker; what comes then is lost, and counted."""
Call = Callable[[Tracker], None]


class AsyncTracker:
    """`open` is called in the thread as well, and again until it succeeds: a server may come up later than the run."""

    def __init__(self, name: str, open: Callable[[], Tracker], say: Callable[[str], None]) -> None:
        self.name = name
        self._open = open
        self._say = say
        self._calls = SimpleQueue[Call | None]()
        self._failed = self._dropped = 0
        self._warned = self._over = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)

    def offer(self, call: Call) -> None:
        """Never waits."""
        if self._thread.ident is None:
            self._thread.start()
        if self._calls.qsize() >= WAITING:
            self._dropped += 1
            self._warn(f"is slow, {WAITING} records wait for it")
        else:
            self._calls.put(call)

    def end(self) -> None:
        """What waits is still worked off; `lost` says how it went."""
        self._calls.put(None)

    def lost(self, timeout_s: float) -> int:
        """Records that did not get through, given so long to end; a thread that hangs is left behind."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self._over = True
        left = self._calls.qsize() if self._thread.is_alive() else 0  # the sentinel counts for the call under way
        return self._failed + self._dropped + left

    def _work(self) -> None:
        tracker: Tracker | None = None
        while (call := self._calls.get()) is not None:
            try:
                if tracker is None:
                    tracker = self._open()
                call(tracker)
            except Exception as error:  # whatever a tracker raises, the run goes on
                self._failed += 1
                self._warn(f"failed with {type(error).__name__}: {error}")
        try:
            if tracker is not None:
                tracker.close()
        except Exception as error:  # the same at its end
            self._warn(f"could not be closed, {type(error).__name__}: {error}")

    def _warn(self, text: str) -> None:
        """Once: a tracker that fails fails often."""
        if not self._warned and not self._over:
            self._warned = True
            self._say(f"tracker {self.name} {text}; the run goes on, and counts what it loses")
