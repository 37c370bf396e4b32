"""Which degrees of parallel training a model admits; planning asks before anything is loaded."""

from collections.abc import Iterator

from asyncrl.config.trainer import Trainer
from asyncrl.errors import ConfigError
from asyncrl.models.config import ModelConfig


def degree_problems(trainer: Trainer, model: ModelConfig) -> Iterator[str]:
    context, experts = trainer.context_parallel, trainer.expert_parallel
    if model.backend == "transformers":
        for name, degree in (("context_parallel", context), ("expert_parallel", experts)):
            if degree != 1:
                yield (
                    f"trainer.{name}={degree} needs our own decoder, and this model ({model.family}) is computed by "
                    f"transformers: set trainer.{name}=1"
                )
        return
    if experts == 1:
        return
    if model.experts is None:
        yield (
            f"trainer.expert_parallel={experts} shares experts, and the model has none: set trainer.expert_parallel=1"
        )
    elif (count := model.experts.count) % trainer.ranks_per_replica:
        replicas = trainer.replicas
        fits = [replicas * each for each in range(experts, count + 1, experts) if count % each == 0]
        of = f", of {replicas} replicas," if replicas > 1 else ""
        yield (
            f"trainer.ranks={trainer.ranks}{of} does not divide the {count} experts of a layer, of which with "
            f"trainer.expert_parallel={experts} each rank keeps as many: set trainer.ranks to "
            f"{' or '.join(map(str, fits)) or 'another number'}, or trainer.expert_parallel=1"
        )


def check_degrees(trainer: Trainer, model: ModelConfig) -> None:
    for problem in degree_problems(trainer, model):
        raise ConfigError(problem)
