"""From settings to the native engine on a CPU or on a GPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.drafter import DrafterSettings
from asyncrl.config.engine import NativeEngine as Settings
from asyncrl.config.precision import Fp8, numerics
from asyncrl.drafting.bandit import Range
from asyncrl.drafting.hidden_capture import RolloutTap
from asyncrl.engines.base import Engine
from asyncrl.engines.native.cpu.engine import NativeEngine
from asyncrl.engines.native.speculation.source import build_chooser


def build_native(
    model_path: Path,
    settings: Settings,
    drafter: DrafterSettings,
    *,
    name: str,
    precision: str = "fp32",
    fp8: Fp8 | None = None,
    tap: RolloutTap | None = None,
    learned: Sequence[Range] = (),
    adapted: Sequence[str] = (),
    routes: bool = False,
) -> Engine:
    found = numerics(precision, fp8 or Fp8())
    dtype = torch.bfloat16 if settings.carrier(precision) == "bf16" else torch.float32
    chooser = build_chooser(drafter, learned)
    common: Any = {"name": name, "dtype": dtype, "numerics": found, "chooser": chooser, "tap": tap, "routes": routes}
    if not settings.on_gpu(drafter, torch.cuda.is_available()):
        torch.set_num_threads(settings.threads)
        return NativeEngine(model_path, settings, drafter, **common)
    from asyncrl.engines.native.cuda.engine import CudaEngine  # it needs Triton, which torch has only for GPUs

    return CudaEngine(model_path, settings, drafter, adapted=adapted, **common)
