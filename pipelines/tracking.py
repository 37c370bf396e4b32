"""The trackers of a run, with those that need Ray."""

from collections.abc import Callable

import msgspec
from rich.markup import escape

from actors import metrics
from asyncrl.config import Run
from asyncrl.rundir import RunDirectory
from asyncrl.tracking.base import Session
from asyncrl.tracking.trackers import Trackers, opener


def trackers(run: Run, directory: RunDirectory, say: Callable[[str], None], *, first_step: int) -> Trackers:
    """Nothing is imported, opened or started before there is something to tell them."""
    session = Session(
        name=run.name,
        project=run.project,
        directory=directory.path,
        config=msgspec.to_builtins(run),
        first_step=first_step,
    )
    openers = {name: opener(name, session) for name in run.trackers if name != "prometheus"}
    if "prometheus" in run.trackers:
        openers["prometheus"] = lambda: metrics.open(session, say)
    return Trackers(openers, lambda text: say(escape(text)))
