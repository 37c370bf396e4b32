"""Weights & Biases. Without a key for it everything stays here, until `wandb sync` sends it."""

import os
from netrc import NetrcParseError, netrc
from typing import Any
from urllib.parse import urlparse
from uuid import uuid4

from asyncrl.observe.trackers.base import Figures, Session, Tracker, named
from asyncrl.system.optional import require


def open(session: Session) -> Tracker:
    wandb: Any = require("wandb", extra="wandb")
    mode = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
    run = wandb.init(
        project=session.project,
        name=session.name,
        id=session.identity("wandb", lambda: uuid4().hex),
        resume="allow" if mode == "online" else None,
        dir=str(session.home),
        config=session.config,
        mode=mode,
        settings=wandb.Settings(console="off", silent=True),
    )
    # Its own counter cannot go back, where a resumed run says some steps again.
    run.define_metric("*", step_metric="trained_steps")
    return Wandb(run)


def _has_key() -> bool:
    """In the environment, or where `wandb login` puts it."""
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return bool(os.environ.get("WANDB_API_KEY") or netrc().authenticators(host))
    except (OSError, NetrcParseError):
        return False


class Wandb:
    def __init__(self, run: Any) -> None:
        self._run = run

    def step(self, step: int, figures: Figures) -> None:
        self._run.log({"trained_steps": step, **named("step", figures)})

    def evaluation(self, step: int, scores: Figures) -> None:
        self._run.log({"trained_steps": step, **named("evaluation", scores)})

    def note(self, step: int, text: str) -> None:
        self._run.log({"trained_steps": step, "note": text})

    def close(self) -> None:
        self._run.finish()
