"""Calls of the user's code, in a worker or in a thread: whatever it does short of ending the process is a result."""

import asyncio
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from asyncrl import functions
from asyncrl.errors import AsyncRLError
from asyncrl.rewards.base import RewardFailure

OURS = (__file__, functions.__file__, str(Path(__file__).with_name("worker.py")))

MAX_MESSAGE = 1000
"""Characters of a failure's message that are kept."""


def attempt(kind: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the call returns, awaited if it has to be, or why it failed."""
    try:
        value = function(*args, **kwargs)
        return asyncio.run(value) if isinstance(value, Coroutine) else value
    except Exception as error:  # the user's code may raise anything
        return RewardFailure(f"{kind}_error", describe(error))


def describe(error: Exception) -> str:
    """One line, with the place if it lies in the user's code."""
    if isinstance(error, AsyncRLError):
        return str(error)[:MAX_MESSAGE]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    ours = frame.filename in OURS or frame.filename.startswith("<frozen ")
    place = "" if ours else f" ({frame.filename}:{frame.lineno})"
    return f"{type(error).__name__}: {error}"[:MAX_MESSAGE] + place
