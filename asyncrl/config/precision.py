"""What `rollout.precision` means, and what of it is refused. No torch here: reading a config imports this."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from asyncrl.config.base import Natural, Settings
from asyncrl.config.engine import EngineSettings, NativeEngine, VllmEngine
from asyncrl.errors import ConfigError
from asyncrl.types import WeightManifest

if TYPE_CHECKING:
    from asyncrl.config.run import Run

Precision = Literal["fp32", "bf16", "fp8", "fp8_kv", "fp8_full"]
SIDE = 128
"""Of a block of weights, and the length of one of activations."""
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp8", "fp8_kv", "fp8_full")
NO_QK_NORM = (
    "keys and values in FP8 need a model with QK-norm, and this one has none: its keys have outliers that take the "
    "range of everybody else, and such models were seen to collapse; use rollout.precision=fp8, or risk it with "
    "rollout.fp8.allow_kv_without_qk_norm=true"
)


class Fp8(Settings, frozen=True):
    """Details of FP8 rollouts."""

    power_of_two: bool = False
    """Scales of weights and activations rounded up to powers of two."""
    keep_first: Natural = 0
    """Layers at the beginning that are not quantized."""
    keep_last: Natural = 0
    allow_kv_without_qk_norm: bool = False


class RolloutPrecision(Settings, frozen=True):
    """The part of the rollout's settings that is about number formats."""

    precision: Precision = "fp32"
    """`fp8` is weights and activations, `fp8_kv` the KV cache, `fp8_full` both."""
    kv_scales: Literal["trainer", "engine"] = "trainer"
    """Who finds the scales of an FP8 KV cache, anew for each version of the weights."""
    fp8: Fp8 = Fp8()


class Numerics(NamedTuple):
    """What an engine has in FP8."""

    weights: bool
    """With them the activations that they are multiplied with."""
    kv: bool
    """Keys and values in the cache, and the queries that meet them."""
    fp8: Fp8


def numerics(precision: str, fp8: Fp8) -> Numerics | None:
    """None where nothing is in FP8."""
    found = Numerics(precision in ("fp8", "fp8_full"), precision in ("fp8_kv", "fp8_full"), fp8)
    return found if found.weights or found.kv else None


def carrier(precision: str, engine: EngineSettings) -> Literal["fp32", "bf16"]:
    """What weights travel in, and what is not in FP8 is computed in; our simulation adds no other rounding to FP8's."""
    if precision == "bf16" or (precision != "fp32" and (isinstance(engine, VllmEngine) or travels_in_fp8(engine))):
        return "bf16"
    return "fp32"


def without_fp8(run: "Run") -> "Run":
    """The same run in what engines compute the rest in, whatever vLLM was told besides."""
    rollout = msgspec.structs.replace(run.rollout, precision=carrier(run.rollout.precision, run.engine))
    engine = run.engine
    if isinstance(engine, VllmEngine):
        engine = msgspec.structs.replace(engine, quantization="none", kv_dtype="auto")
    return msgspec.structs.replace(run, rollout=rollout, engine=engine)


def travels_in_fp8(engine: EngineSettings) -> bool:
    """Whether FP8 weights are quantized by the trainer, in blocks. Other engines quantize what they get."""
    if isinstance(engine, VllmEngine):
        return engine.quantization == "fp8_per_block"
    return isinstance(engine, NativeEngine) and engine.device == "cuda"


def gathered_in(run: "Run", *, quantizes: bool) -> Literal["fp32", "bf16"]:
    """What the trainer's weights are rounded to before they leave, or before it quantizes them.

    Quantized are the numbers that it computes with. bf16 does not show a step that is small beside a weight, and FP8
    made of the fp32 masters does, now and then: engines would serve a policy that the trainer cannot see.
    """
    return run.trainer.dtype if quantizes else carrier(run.rollout.precision, run.engine)


def vllm_in(settings: VllmEngine, precision: str) -> VllmEngine:
    """`rollout.precision` in vLLM's words; what is set for the engine stays."""
    found = numerics(precision, Fp8())
    if found is None:
        return settings
    weights = "fp8" if found.weights and settings.quantization == "none" else settings.quantization
    return msgspec.structs.replace(settings, quantization=weights, kv_dtype="fp8" if found.kv else settings.kv_dtype)


def served_precision(run: "Run", served: WeightManifest | None) -> str:
    """Of what an engine samples under a publication; before the first it is the one that the engine was started in."""
    rollout, engine = run.rollout, run.engine
    fell_back = isinstance(engine, NativeEngine) and served is not None and served.fp8 is None
    return carrier(rollout.precision, engine) if fell_back else rollout.precision


def check_precision(run: "Run") -> None:
    """What the settings alone can tell; `model_problems` knows the model."""
    rollout, engine = run.rollout, run.engine
    if isinstance(engine, VllmEngine):
        _check_vllm(rollout, engine)
    if numerics(rollout.precision, rollout.fp8) is None:
        return
    if isinstance(engine, NativeEngine) and engine.device == "auto":
        raise ConfigError(
            f"rollout.precision={rollout.precision}: on a GPU it is FP8, on a CPU a simulation in fp32, and the "
            "trainer publishes for one of them; use engine.device=cuda or engine.device=cpu instead of auto"
        )
    if (isinstance(engine, VllmEngine) or travels_in_fp8(engine)) and run.sentinel.on_fp8 == "fall_back":
        who = "vLLM" if isinstance(engine, VllmEngine) else "our engine on a GPU"
        raise ConfigError(
            f"sentinel.on_fp8=fall_back: {who} cannot leave FP8 while it runs; use sentinel.on_fp8=restart or stop"
        )


def _check_vllm(rollout: RolloutPrecision, engine: VllmEngine) -> None:
    """Trainer and engine are told by different settings what is in FP8, and each would believe its own."""
    found = numerics(rollout.precision, rollout.fp8)
    weights, kv = found is not None and found.weights, found is not None and found.kv
    if engine.quantization != "none" and not weights and (found is not None or travels_in_fp8(engine)):
        better = "fp8_full" if kv else "fp8"
        raise ConfigError(
            f"engine.quantization={engine.quantization} has weights in FP8, and rollout.precision={rollout.precision} "
            f"has not; use rollout.precision={better}, or engine.quantization=none"
        )
    if engine.kv_dtype == "fp8" and found is not None and not kv:
        raise ConfigError(
            f"engine.kv_dtype=fp8 has keys and values in FP8, and rollout.precision={rollout.precision} has not; use "
            "rollout.precision=fp8_full, or engine.kv_dtype=auto"
        )
    if weights and rollout.fp8.power_of_two:
        raise ConfigError(
            "rollout.fp8.power_of_two=true: vLLM chooses scales by itself; use rollout.fp8.power_of_two=false, or "
            "engine=native"
        )
    if kv and rollout.kv_scales == "trainer" and engine.attention == "FLASHINFER":
        raise ConfigError(
            "rollout.kv_scales=trainer: engine.attention=FLASHINFER has scales in its captured graphs, where new ones "
            "do not reach them; use rollout.kv_scales=engine, or another engine.attention"
        )


def model_problems(run: "Run", *, layers: int, qk_norm: bool, joined: Sequence[int] = ()) -> Iterator[str]:
    """`joined`: outputs of the matrices that vLLM joins with others."""
    rollout = run.rollout
    found = numerics(rollout.precision, rollout.fp8)
    if found is None:
        return
    if found.kv and not qk_norm and not rollout.fp8.allow_kv_without_qk_norm:
        yield f"rollout.precision={rollout.precision}: {NO_QK_NORM}"
    kept = rollout.fp8.keep_first + rollout.fp8.keep_last
    if found.weights and kept >= layers:
        yield (
            f"rollout.fp8.keep_first={rollout.fp8.keep_first} and keep_last={rollout.fp8.keep_last} keep all {layers} "
            "layers of the model, so that nothing is quantized; lower them"
        )
    if isinstance(run.engine, VllmEngine) and travels_in_fp8(run.engine):
        parts = (size // run.engine.tensor_parallel for size in joined)
        for size in {size for size in parts if size % SIDE}:
            yield (
                f"engine.quantization=fp8_per_block: vLLM joins matrices, and a block of {SIDE} would lie across the "
                f"end of one with {size} outputs; use engine.quantization=fp8"
            )
