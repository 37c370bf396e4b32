"""What goes with a model that is trained through transformers, and what does not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from asyncrl.config import Run
from asyncrl.config.engine import EngineBase, EngineSettings
from asyncrl.config.precision import numerics
from asyncrl.errors import CheckpointError
from asyncrl.models.config import ModelConfig, read_config
from asyncrl.models.files import tensor_sizes

NOT_SUPPORTED = "router replay, FP8 rollouts, draft heads that the trainer taps"
STATEFUL = ("linear_attention", "conv", "mamba", "chunked_attention")
"""Layers that do not look at positions: packed samples would see each other."""
BATCH_ROPE = ("dynamic", "longrope")


def described(model: ModelConfig) -> str:
    """One line for `asyncrl plan` and `asyncrl doctor`."""
    if model.backend == "native":
        return "our own decoder; samples are packed, with the prompt of a group once"
    return f"{model.architecture} of transformers; {_packing(model)}; not with it: {NOT_SUPPORTED}"


def _packing(model: ModelConfig) -> str:
    if any(kind in STATEFUL for kind in _text(model).get("layer_types") or ()):
        return "samples are padded rows"
    return "samples are packed if a trial as it is loaded shows that they do not see each other, else padded rows"


def problems(run: Run, model: ModelConfig, longest: int) -> Iterator[str]:
    """A sentence for each setting that does not go with the model; `longest`: tokens of prompt and completion."""
    yield from _targets(run)
    if model.backend == "native":
        return
    known = run.model.directory is None or _has_own(run.model.directory)
    family = f"model_type={model.family}"
    if run.engine.own_decoder and not known:
        yield (
            f"engine={run.engine.label} computes with our own decoder, which does not know {family}: use "
            f"{_engines_of_others()}"
        )
    if run.rollout.router_replay == "on":
        yield (
            "rollout.router_replay=on: transformers chooses the experts of each token by itself; set "
            f"rollout.router_replay=off{_or_native(known)}"
        )
    if numerics(run.rollout.precision, run.rollout.fp8) is not None or run.engine.own_fp8:
        wide = run.engine.carrier(run.rollout.precision)
        yield (
            f"rollout.precision={run.rollout.precision}: FP8 is for models that our own decoder trains; set "
            f"rollout.precision={wide}{_or_native(known)}"
        )
    if (head := run.drafter.head) is not None and not known:
        yield f"drafter={head.kind} is for models of our own decoder, which does not know {family}: use drafter=none"
    if run.algorithm.router_aux_loss:
        yield (
            f"algorithm.router_aux_loss={run.algorithm.router_aux_loss:g}: routers of a model of transformers are not "
            f"observed; set algorithm.router_aux_loss=0{_or_native(known)}"
        )
    yield from _rope(model, longest)


def _engines_of_others() -> str:
    members: tuple[type[EngineBase], ...] = get_args(EngineSettings)
    able = (each.__struct_config__.tag for each in members if each.has_model and not each.own_decoder)
    return " or ".join(f"engine={tag}" for tag in able)


def _or_native(known: bool) -> str:
    return ", or model.backend=native" if known else ""


def _has_own(directory: Path) -> bool:
    try:
        read_config(directory)
    except CheckpointError:
        return False
    return True


def _targets(run: Run) -> Iterator[str]:
    """Adapters for layers that the files do not have."""
    if not run.trainer.lora.rank or (directory := run.model.directory) is None:
        return
    kinds = {name.split(".")[-2] for name in tensor_sizes(directory) if name.endswith(".weight") and ".layers." in name}
    missing = [target for target in run.trainer.lora.targets if target not in kinds]
    if missing and kinds:
        yield (
            f"trainer.lora.targets names {', '.join(missing)}, and the model has no such layers; name some of "
            f"{', '.join(sorted(kind for kind in kinds if 'norm' not in kind))}"
        )


def _rope(model: ModelConfig, longest: int) -> Iterator[str]:
    text = _text(model)
    found: dict[str, Any] = text.get("rope_parameters") or text.get("rope_scaling") or {}
    one_for_all = "rope_type" in found or "type" in found
    for rope in [found] if one_for_all else [each for each in found.values() if isinstance(each, dict)]:
        kind = rope.get("rope_type", rope.get("type"))
        positions = rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
        if kind not in BATCH_ROPE or not positions or longest <= positions:
            continue
        yield (
            f"rope_type={kind} stretches every sample of a batch if one is longer than {positions} tokens, and prompt "
            f"with completion may have {longest}: lower rollout.max_tokens by {longest - positions}"
        )


def _text(model: ModelConfig) -> dict[str, Any]:
    return model.raw.get("text_config") or model.raw
