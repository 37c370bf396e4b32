"""From settings to the vLLM engine, and what stands in its way. vLLM itself is imported when one is built."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config import Run
from asyncrl.config.drafter import DrafterSettings
from asyncrl.config.engine import VllmEngine
from asyncrl.config.precision import Fp8, numerics
from asyncrl.drafting.bandit import Range
from asyncrl.engines.base import Engine
from asyncrl.engines.vllm import environment
from asyncrl.errors import EngineError, MissingDependencyError
from asyncrl.system import minimum_versions
from asyncrl.system.devices import has_avx512, has_gpu

if TYPE_CHECKING:
    from asyncrl.drafting.hidden_capture import RolloutTap


def build_vllm(
    model_path: Path,
    settings: VllmEngine,
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
    if tap is not None:
        raise EngineError("vLLM gives no hidden states as it decodes; use drafter.training.source=trainer")
    if wrong := minimum_versions.vllm_problem(minimum_versions.vllm_installed()):
        raise MissingDependencyError(wrong)
    environment.prepare(settings, precision)  # vLLM reads some of it when it is imported
    from asyncrl.engines.vllm.engine import VllmEngine as Vllm

    return Vllm(
        model_path,
        settings,
        drafter,
        name=name,
        precision=precision,
        fp8=fp8,
        learned=learned,
        adapted=adapted,
        routes=routes,
    )


def problems(run: Run, engine: VllmEngine) -> Iterator[str]:
    """A sentence for each thing that this machine lacks, with the way out."""
    if wrong := minimum_versions.vllm_problem(minimum_versions.vllm_installed()):
        yield wrong
    yield from environment.problems(engine)
    here = run.cluster in ("local", "inprocess")
    if not here or has_gpu():
        return
    if numerics(run.rollout.precision, run.rollout.fp8) is not None:
        chosen = run.rollout.precision
        yield f"rollout.precision={chosen} with engine=vllm needs a GPU; engine=native simulates FP8 on a CPU"
    if (chosen := engine.quantization) != "none":
        yield f"engine.quantization={chosen} needs a GPU, and there is none here; use engine.quantization=none"
    if engine.attention != "auto":
        yield f"engine.attention={engine.attention} needs a GPU, and there is none here; use engine.attention=auto"
    if engine.kv_dtype == "fp8" and not has_avx512():
        yield "engine.kv_dtype=fp8 needs a GPU or an x86 CPU with AVX-512; use engine.kv_dtype=auto"
    if run.drafter.drafting is not None and run.rollout.temperature > 0:
        yield (
            f"drafter={run.drafter.kind} with engine=vllm needs a GPU: on a CPU vLLM 0.29 samples drafted tokens "
            "wrongly and reports wrong log-probabilities; use engine=native, or drafter=none"
        )
    if engine.tensor_parallel > 1:
        yield f"engine.tensor_parallel={engine.tensor_parallel} needs as many GPUs, and there is none here"
