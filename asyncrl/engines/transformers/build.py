"""From settings to the engine over transformers, which is imported when one is built, and what stands in its way."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config import Run
from asyncrl.config.drafter import DrafterSettings
from asyncrl.config.engine import TransformersEngine as Settings
from asyncrl.config.precision import Fp8
from asyncrl.drafting.bandit import Range
from asyncrl.engines.base import Engine
from asyncrl.errors import MissingDependencyError
from asyncrl.system import minimum_versions

if TYPE_CHECKING:
    from asyncrl.drafting.hidden_capture import RolloutTap


def build_transformers(
    model_path: Path,
    settings: Settings,
    drafter: DrafterSettings,
    *,
    name: str,
    precision: str = "fp32",
    fp8: Fp8 | None = None,
    tap: "RolloutTap | None" = None,
    learned: Sequence[Range] = (),
    adapted: Sequence[str] = (),
    routes: bool = False,
) -> Engine:
    """What this engine cannot do (drafts, FP8, routes, adapters) is refused in its settings."""
    if wrong := minimum_versions.transformers_problem():
        raise MissingDependencyError(wrong)
    import torch

    from asyncrl.engines.transformers.engine import TransformersEngine

    on_gpu = settings.on_gpu(drafter, torch.cuda.is_available())
    if not on_gpu:
        torch.set_num_threads(settings.threads)
    dtype = torch.bfloat16 if settings.carrier(precision) == "bf16" else torch.float32
    device = torch.device("cuda" if on_gpu else "cpu")
    return TransformersEngine(model_path, settings, name=name, dtype=dtype, device=device)


def problems(run: Run, engine: Settings) -> Iterator[str]:
    """A sentence for each thing that this machine lacks, with the way out."""
    if wrong := minimum_versions.transformers_problem():
        yield wrong
