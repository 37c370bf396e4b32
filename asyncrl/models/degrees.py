"""Which degrees of parallel training a model admits; planning asks before anything is loaded."""

from collections.abc import Iterator

from asyncrl.config.trainer import Trainer
from asyncrl.errors import ConfigError
from asyncrl.models.config import ModelConfig


def degree_problems(trainer: Trainer, model: ModelConfig) -> Iterator[str]:
    context = trainer.context_parallel
    if context > 1 and model.backend == "transformers":
        yield (
            f"trainer.context_parallel={context} needs our own decoder, and this model ({model.family}) is computed by "
            "transformers: set trainer.context_parallel=1"
        )
    elif model.heads % context:
        fits = [degree for degree in range(1, trainer.ranks + 1) if trainer.ranks % degree == model.heads % degree == 0]
        yield (
            f"trainer.context_parallel={context} does not divide the {model.heads} attention heads of the model, of "
            f"which each rank computes as many: with trainer.ranks={trainer.ranks} set it to "
            f"{' or '.join(map(str, fits))}"
        )


def check_degrees(trainer: Trainer, model: ModelConfig) -> None:
    for problem in degree_problems(trainer, model):
        raise ConfigError(problem)
