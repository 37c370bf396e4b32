"""The child that calls the user's reward function: `python -m asyncrl.rewards.worker module:function`.

Requests come in on stdin and answers go out on stdout, one frame each: four bytes of length, then msgpack. The first
answer says whether the function could be imported. The user's code gets neither pipe: its prints go to stderr and its
stdin is empty. When the parent goes away, in whatever manner, the worker ends itself and everything in its group.
"""

import math
import os
import select
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from numbers import Real
from typing import BinaryIO

import msgspec

from asyncrl import functions
from asyncrl.errors import AsyncRLError
from asyncrl.functions import find_function
from asyncrl.rewards.base import RewardFailure, RewardInput, RewardResult

HEADER = struct.Struct("<I")
MAX_MESSAGE = 1000
"""Characters of a failure's message that are kept."""

Function = Callable[[str, str, str], object]


def main(location: str) -> None:
    requests, answers = _private_pipes()
    threading.Thread(target=_die_with_parent, args=(requests.fileno(),), daemon=True).start()
    function = _load(location)
    _answer(answers, function if isinstance(function, RewardFailure) else 0.0)
    if isinstance(function, RewardFailure):
        return
    decoder = msgspec.msgpack.Decoder(RewardInput)
    while header := requests.read(HEADER.size):
        (length,) = HEADER.unpack(header)
        _answer(answers, judge(function, decoder.decode(requests.read(length))))


def judge(function: Function, sample: RewardInput) -> RewardResult:
    """Call the function; whatever it does short of ending the process becomes a result."""
    try:
        value = function(sample.prompt, sample.completion, sample.answer)
        if isinstance(value, Real) and math.isfinite(value):
            return float(value)
    except Exception as error:  # the user's code may raise anything
        return RewardFailure("reward_error", describe(error))
    return RewardFailure("reward_invalid", f"returned {value!r:.200}; a reward must be a finite number")


def describe(error: Exception) -> str:
    """One line, with the place if it lies in the user's code."""
    if isinstance(error, AsyncRLError):
        return str(error)[:MAX_MESSAGE]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    ours = frame.filename in (__file__, functions.__file__) or frame.filename.startswith("<frozen ")
    place = "" if ours else f" ({frame.filename}:{frame.lineno})"
    return f"{type(error).__name__}: {error}"[:MAX_MESSAGE] + place


def _load(location: str) -> Function | RewardFailure:
    try:
        return find_function(location)
    except Exception as error:  # importing runs the user's code
        return RewardFailure("reward_error", describe(error))


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def _answer(answers: BinaryIO, result: RewardResult) -> None:
    payload = msgspec.msgpack.encode(result)
    answers.write(HEADER.pack(len(payload)) + payload)


def _die_with_parent(requests: int) -> None:
    """Wait until the other end of stdin is closed, also while the function runs or hangs."""
    poll = select.poll()
    poll.register(requests, 0)  # no event but the hang-up
    poll.poll()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
