"""Background tasks whose result nobody may await."""

import asyncio
from typing import Any


def retrieve_exception(task: "asyncio.Task[Any]") -> None:
    """Done-callback: mark a task's exception as seen, even if everyone who awaited it was cancelled by another failure,
    which is the one that is reported."""
    if not task.cancelled():
        task.exception()
