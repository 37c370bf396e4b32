"""The weights with the best held-out score, in `best/` of the run's directory, whatever checkpoints are kept.

A checkpoint is linked into `.candidate-STEP` as soon as it is durable, since it may be pruned before its evaluation is
over. The one with the highest score becomes `best/`, a model in Hugging Face layout, with `score.json` beside it.
"""

import os
import shutil
from pathlib import Path

import msgspec

from asyncrl.system.storage import storing
from asyncrl.training.checkpoint_manifest import MANIFEST
from pipelines.evaluate import Scores

SCORE = "score.json"
NO_MODEL = (MANIFEST, "optimizer", "critic")
"""How the names of files begin that only a resumed run needs."""


class Best(msgspec.Struct, frozen=True, kw_only=True):
    """Which weights lie there."""

    step: int
    score: float
    name: str
    """Of the score, as in `evaluation.best`."""


class BestWeights:
    def __init__(self, path: Path, name: str) -> None:
        """`path` is that of `best/`."""
        self._path, self._name = path, name
        self._waiting: dict[int, float] = {}
        """Scores of steps whose checkpoint is not durable yet."""
        self._candidates = set[int]()
        self.close()

    @property
    def found(self) -> Best | None:
        file = self._path / SCORE
        return msgspec.json.decode(file.read_bytes(), type=Best) if file.is_file() else None

    def saved(self, step: int, checkpoint: Path) -> None:
        """A checkpoint is durable, and its step may have been evaluated or be evaluated yet."""
        candidate = self._candidate(step)
        with storing(candidate):
            shutil.rmtree(candidate, ignore_errors=True)
            shutil.copytree(checkpoint, candidate, copy_function=os.link, ignore=_only_training)
        self._candidates.add(step)
        if step in self._waiting:
            self._decide(step, self._waiting.pop(step))

    def scored(self, step: int, scores: Scores) -> None:
        """Steps are scored one after the other, so that those before it need no score any more."""
        for earlier in [each for each in self._candidates if each < step]:
            shutil.rmtree(self._candidate(earlier))
            self._candidates.discard(earlier)
        if step in self._candidates:
            self._decide(step, scores.value(self._name))
        else:
            self._waiting[step] = scores.value(self._name)

    def _decide(self, step: int, score: float) -> None:
        candidate, before = self._candidate(step), self.found
        self._candidates.discard(step)
        if before is not None and before.score >= score:
            shutil.rmtree(candidate)
            return
        with storing(candidate):
            best = Best(step=step, score=score, name=self._name)
            (candidate / SCORE).write_bytes(msgspec.json.encode(best))
            shutil.rmtree(self._path, ignore_errors=True)
            candidate.rename(self._path)

    def close(self) -> None:
        for left in self._path.parent.glob(".candidate-*"):
            shutil.rmtree(left)

    def _candidate(self, step: int) -> Path:
        return self._path.with_name(f".candidate-{step}")


def _only_training(_: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(NO_MODEL)]
