"""What `rollout.precision` means, and what of it is refused; `asyncrl.config.engine` has what engines make of it."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from asyncrl.config.base import Natural, Settings
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


def without_fp8(run: "Run") -> "Run":
    """The same run in what engines compute the rest in, whatever an engine was told besides."""
    rollout = msgspec.structs.replace(run.rollout, precision=run.engine.carrier(run.rollout.precision))
    return msgspec.structs.replace(run, rollout=rollout, engine=run.engine.without_fp8())


def gathered_in(run: "Run", *, quantizes: bool) -> Literal["fp32", "bf16"]:
    """What the trainer's weights are rounded to before they leave, or before it quantizes them.

    Quantized are the numbers that it computes with. bf16 does not show a step that is small beside a weight, and FP8
    made of the fp32 masters does, now and then: engines would serve a policy that the trainer cannot see.
    """
    return run.trainer.dtype if quantizes else run.engine.carrier(run.rollout.precision)


def served_precision(run: "Run", served: WeightManifest | None) -> str:
    """Of what an engine samples under a publication; before the first it is the one that the engine was started in."""
    fell_back = run.engine.fp8_by_publication and served is not None and served.fp8 is None
    return run.engine.carrier(run.rollout.precision) if fell_back else run.rollout.precision


def check_precision(run: "Run") -> None:
    """What the settings alone can tell; `model_problems` knows the model."""
    run.engine.check_precision(run.rollout)
    in_fp8 = numerics(run.rollout.precision, run.rollout.fp8) is not None
    if in_fp8 and run.engine.real_fp8 and run.sentinel.on_fp8 == "fall_back":
        raise ConfigError(
            f"sentinel.on_fp8=fall_back: engine={run.engine.label} cannot leave FP8 while it runs; use "
            "sentinel.on_fp8=restart or stop"
        )


def model_problems(run: "Run", *, layers: int, qk_norm: bool, joined: Sequence[int] = ()) -> Iterator[str]:
    """`joined`: outputs of the matrices that some engines join with others."""
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
    yield from run.engine.model_problems(joined)
