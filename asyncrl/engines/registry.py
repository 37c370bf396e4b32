"""From settings to an engine. Each engine is imported only when chosen."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config import Run
from asyncrl.config.drafter import DrafterSettings
from asyncrl.config.engine import FakeEngine, NativeEngine, VllmEngine
from asyncrl.config.precision import Fp8, numerics
from asyncrl.drafting.bandit import Range
from asyncrl.engines.base import Engine
from asyncrl.engines.vllm import environment
from asyncrl.errors import MissingDependencyError
from asyncrl.system import minimum_versions

if TYPE_CHECKING:
    from asyncrl.drafting.hidden_capture import RolloutTap


def build_engine(
    run: Run, model_path: Path, *, name: str, tap: "RolloutTap | None" = None, learned: Sequence[Range] = ()
) -> Engine:
    """`tap`: where hidden states for a drafter go (native engine on a CPU); `learned` by an engine before this one."""
    match run.engine:
        case FakeEngine():
            from asyncrl.engines.fake import FakeEngine as Fake

            return Fake(run.engine, name=name)
        case NativeEngine():
            from asyncrl.engines.native.build import build_native

            build = partial(build_native, model_path, run.engine, tap=tap)
        case VllmEngine():
            build = partial(build_vllm, model_path, run.engine)
    precision, fp8 = run.rollout.precision, run.rollout.fp8
    return build(run.drafter, name=name, precision=precision, fp8=fp8, learned=learned)


def takes_adapters(run: Run) -> bool:
    """Whether the engines merge adapters into the weights that they were started with; others get merged weights."""
    plain = numerics(run.rollout.precision, run.rollout.fp8) is None
    return isinstance(run.engine, NativeEngine) and plain and not on_gpu(run)


def on_gpu(run: Run) -> bool:
    """Whether the engines of a run compute on a GPU, where there is one."""
    match run.engine:
        case NativeEngine():
            from asyncrl.engines.native.build import on_gpu as native_on_gpu

            return native_on_gpu(run.engine, run.drafter)
        case VllmEngine():
            return True
        case FakeEngine():
            return False


def build_vllm(
    model_path: Path,
    settings: VllmEngine,
    drafter: DrafterSettings,
    *,
    name: str,
    precision: str = "fp32",
    fp8: Fp8 | None = None,
    learned: Sequence[Range] = (),
) -> Engine:
    if wrong := minimum_versions.problem(minimum_versions.installed()):
        raise MissingDependencyError(wrong)
    environment.prepare(settings, precision)  # vLLM reads some of it when it is imported
    from asyncrl.engines.vllm.engine import VllmEngine as Vllm

    return Vllm(model_path, settings, drafter, name=name, precision=precision, fp8=fp8, learned=learned)
