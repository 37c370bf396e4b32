"""The process of the command itself: the run is in another one, which it outlives.

    asyncrl run ----fork----> the run: driver of Ray
        |  signals  ------------>  |
        |  <------- its directory  |
        |  waits                   |  dies with Ray, or for want of memory
        +--fork----> asyncrl resume

Ray ends a driver that has lost Ray's own processes without a word to Python. Here this has a sentence and an exit code,
and where `recovery.max_restarts` allows it the run goes on, with a new Ray. The run is in a session of its own: what is
sent to the process group of the command, as Ctrl-C and `timeout` do, would reach Ray, too. When this process is killed,
the run ends, and what either leaves behind is ended by the other.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from asyncrl.config import Run
from asyncrl.errors import RayError
from asyncrl.system import ownership

SIGNALS = signal.SIGTERM, signal.SIGINT
"""That ask a run to end."""
LINE = "ASYNCRL_SUPERVISOR"
"""The environment variable with the file descriptor to the supervisor."""
CLOSE_S = 5.0
"""For what belongs to the run to end after it."""
LOOK_S = 0.1


class Told(msgspec.Struct):
    """What a run tells its supervisor."""

    directory: str = ""
    max_restarts: int = 0
    code: int | None = None
    """The exit code that it wants; None: it died before it wanted one."""


def supervise(run: Callable[[], int], resume: Callable[[Path], int]) -> int:
    """Call `run` in a process of its own, and `resume` in others as long as those die; returns the exit code."""
    os.environ[ownership.MARK] = owner = ownership.mark()
    command, restarts = _Command(), 0
    for number in SIGNALS:
        signal.signal(number, command.forward)
    while True:
        ended = command.watch(run)
        if isinstance(ended, int):  # this is the run's process
            return ended
        _clear(owner)
        code, told = ended
        if told.code not in (None, RayError.exit_code) or not told.directory or command.signalled:
            wanted = code if told.code is None else told.code
            return wanted if wanted >= 0 else 128 - wanted  # as shells count signals
        again, how = f"asyncrl resume {told.directory}", "has lost Ray" if told.code else _death(code)
        if restarts >= told.max_restarts:
            if told.code is None:
                print(f"asyncrl: the run's process {how}; continue with: {again}", file=sys.stderr, flush=True)
            return RayError.exit_code
        restarts += 1
        counted = f"restart {restarts} of {told.max_restarts}, recovery.max_restarts"
        print(f"the run's process {how}: it goes on with {again} ({counted})", flush=True)
        run = partial(resume, Path(told.directory))


class _Command:
    def __init__(self) -> None:
        self._pid = 0
        self.signalled = False

    def forward(self, number: int, _: object) -> None:
        """To the run. Where there is none it has ended, and what is left to do takes no longer than a signal would."""
        self.signalled = True
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def watch(self, run: Callable[[], int]) -> tuple[int, Told] | int:
        """The exit code of a new process, negative for a signal, and what it has told; in that process, what `run`
        returns."""
        mine, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # one that comes now is told to the new process
        self._pid = os.fork()
        if not self._pid:
            mine.close()
            return _supervised(run, theirs)
        if self.signalled:  # while there was none
            os.kill(self._pid, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        theirs.close()
        lines, status = b"", 0
        with mine:
            mine.settimeout(LOOK_S)
            while not os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                lines += _received(mine)
            while more := _received(mine):
                lines += more
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        told = lines.splitlines()
        return os.waitstatus_to_exitcode(status), msgspec.json.decode(told[-1], type=Told) if told else Told()


def _received(line: socket.socket) -> bytes:
    try:
        if found := line.recv(1 << 16):
            return found
        time.sleep(LOOK_S)  # the other end is closed: its process is ending
    except TimeoutError:
        pass
    return b""


def _supervised(run: Callable[[], int], line: socket.socket) -> int:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.environ[LINE] = str(line.detach())
    threading.Thread(target=_end_with_the_command, daemon=True).start()
    code = 1
    try:
        code = run()
    finally:
        for number in SIGNALS:  # there is nothing more to end
            signal.signal(number, signal.SIG_IGN)
        _tell(code=code)
    return code


def _end_with_the_command() -> None:
    os.read(int(os.environ[LINE]), 1)  # it never says anything: this returns when it is gone
    ownership.end(ownership.owned(os.environ[ownership.MARK]))
    os.kill(os.getpid(), signal.SIGKILL)


_told = Told()


def tell(run: Run, directory: Path) -> None:
    """The supervisor, if there is one, where the run is and how often it may be started again."""
    _tell(directory=str(directory), max_restarts=run.recovery.max_restarts)


def leave(reason: str, code: int, record: Callable[[], object]) -> NoReturn:
    """End this process now, with all that belongs to it, where nothing can be closed in good order. `record` comes
    first, and may fail, as on a full disk."""
    try:
        record()
    except Exception as error:  # whatever it is: who calls this cannot go on
        print(f"asyncrl: the end could not be recorded: {error}", file=sys.stderr, flush=True)
    print(f"asyncrl: {reason}", file=sys.stderr, flush=True)
    _tell(code=code)
    if (owner := os.environ.get(ownership.MARK)) is not None:
        ownership.end(ownership.owned(owner))
    sys.stdout.flush()
    os._exit(code)


def _tell(**known: Any) -> None:
    global _told
    _told = msgspec.structs.replace(_told, **known)
    if (line := os.environ.get(LINE)) is not None:
        with suppress(OSError):  # it is gone, and this process is about to be
            os.write(int(line), msgspec.json.encode(_told) + b"\n")


def _clear(owner: str) -> None:
    """End what is left of the run; most of it ends by itself."""
    deadline = time.monotonic() + CLOSE_S
    while found := list(ownership.owned(owner)):
        if time.monotonic() > deadline:
            ownership.end(found)
            return
        time.sleep(LOOK_S)


def _death(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL: by somebody, or by the kernel for want of memory)"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
