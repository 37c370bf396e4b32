"""What is asked next: the prompts in the order of their source, or those that the model learns most from."""

from typing import TYPE_CHECKING, Literal

from asyncrl.config.base import Fraction, Positive, Settings
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config.run import Run


class Curriculum(Settings, frozen=True):
    """Sampling of prompts by how often they are solved; off without a band."""

    band: tuple[float, float] | None = None
    """Mean rewards [low, high] of a prompt that are wanted: with rewards of 0 and 1 its success rate. Prompts above it
    are left out of most passes; null: prompts are asked in the order of their source."""
    replay: Fraction = 0.25
    """Share of the groups that get a prompt asked before, whose mean reward was in the band or below it."""
    hard: Fraction = 0.25
    """Of these, the share that was below the band."""
    pool: Positive = 256
    """Prompts of each source that wait for a replay, in the band and below it: the ones measured last."""
    revisit: Positive = 4
    """A prompt above the band is asked in every so manieth pass over its source."""
    weights: Literal["fixed", "follow"] = "fixed"
    """Weights of the sources of task=mix: as they are, or times the share of a source's last groups in the band."""

    def __post_init__(self) -> None:
        if self.band is not None and not self.band[0] < self.band[1]:
            raise ValueError(f"band={list(self.band)} must be [low, high] with low below high, such as [0.2, 0.8]")

    @property
    def on(self) -> bool:
        return self.band is not None


def check_curriculum(run: "Run") -> None:
    """Refuse what would do nothing."""
    if run.curriculum.weights == "follow" and not run.curriculum.on:
        raise ConfigError("curriculum.weights=follow needs a band to follow: set curriculum.band=[0.2,0.8]")
    if run.curriculum.weights == "follow" and len(run.task.weights) < 2:
        raise ConfigError(
            f"curriculum.weights=follow changes the weights of several sources, and task={run.task.kind} is one; use "
            "task=mix, or curriculum.weights=fixed"
        )
