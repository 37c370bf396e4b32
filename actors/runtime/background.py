"""Tasks that nobody may be waiting for."""

import asyncio
from typing import Any


def notice(task: "asyncio.Task[Any]") -> None:
    """Look at a failure even if everyone who waited for it was cancelled by another one, which then is reported."""
    if not task.cancelled():
        task.exception()
