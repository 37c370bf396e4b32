"""Background tasks whose result nobody may await."""

import asyncio
from typing import Any


def retrieve_exception(task: "asyncio.Future[Any]") -> None:
    """Done-callback: mark the exception of a task or future as seen, even if everyone who awaited it was cancelled by
    another failure, which is the one that is reported."""
    if not task.cancelled():
        task.exception()
