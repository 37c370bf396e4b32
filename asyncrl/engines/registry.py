"""Every engine, by its settings. Each is imported only when chosen; nothing here needs torch.

A new one is its settings in `asyncrl.config.engine`, a file with a `Build` function, and a line here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import msgspec

from asyncrl.config import Rollout, Run
from asyncrl.config.drafter import DrafterSettings, NoDrafter
from asyncrl.config.engine import EngineBase, FakeEngine, NativeEngine, TransformersEngine, VllmEngine
from asyncrl.config.precision import Fp8, RolloutPrecision
from asyncrl.config.weights import published_adapters
from asyncrl.drafting.bandit import Range
from asyncrl.engines.base import Engine
from asyncrl.errors import CheckpointError
from asyncrl.models.config import read_config, runs_natively
from asyncrl.models.files import tensor_sizes
from asyncrl.precision.memory import footprint
from asyncrl.system.devices import gpu_memory, has_gpu, runs_vllm

if TYPE_CHECKING:
    from asyncrl.drafting.hidden_capture import RolloutTap


T = TypeVar("T")
FULL = 0.8
"""Of an engine's memory, which weights may take; the rest is KV cache."""


class Build(Protocol):
    """From settings to an engine that has not started yet."""

    def __call__(
        self,
        model_path: Path,
        settings: Any,
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
        """`tap`: where hidden states for a drafter go; `learned` about drafting by an engine before this one;
        `adapted`: the projections of which only adapters will be published; `routes`: return them with the tokens, if
        the model has experts."""
        ...


class Entry(NamedTuple):
    """Both as `module:function`."""

    build: str
    """A `Build`."""
    problems: str = ""
    """Called with the run and its engine's settings before anything starts, also where there is no torch: a sentence
    for each thing that stands in the way here, with the way out."""


ENGINES: dict[type[EngineBase], Entry] = {
    NativeEngine: Entry("asyncrl.engines.native.build:build_native"),
    VllmEngine: Entry("asyncrl.engines.vllm.build:build_vllm", problems="asyncrl.engines.vllm.build:problems"),
    TransformersEngine: Entry(
        "asyncrl.engines.transformers.build:build_transformers", problems="asyncrl.engines.transformers.build:problems"
    ),
    FakeEngine: Entry("asyncrl.engines.fake:build_fake"),
}


class Choice(NamedTuple):
    """What `engine=auto` stands for, on this machine and with this model."""

    settings: dict[str, Any]
    why: str


def choose_engine(
    model: Mapping[str, Any],
    asked: Mapping[str, Any],
    rollout: RolloutPrecision,
    drafter: DrafterSettings,
) -> Choice:
    """`asked`: settings of the engine that are given beside `auto`; `rollout` and `drafter` are those of the run, which
    not every engine can have.

    On a GPU our engine was measured at 1.15 to 3.6 times the tokens of vLLM with dense models (docs/benchmarks.md), and
    at about half of them with experts.
    """
    path = Path(model["path"]).expanduser() if model.get("path") else None
    own = {name: value for name, value in asked.items() if name != "type"}
    if only := set(own) & (set(VllmEngine.__struct_fields__) - set(NativeEngine.__struct_fields__)):
        return Choice({**own, "type": "vllm"}, f"engine.{min(only)} is a setting of vLLM")
    if path is not None and not runs_natively(path):
        known = "vllm" if runs_vllm() else "transformers"
        return Choice({**own, "type": known}, "our decoder does not know the model")
    if not has_gpu():
        return Choice({**own, "type": "native"}, "no GPU was found")
    if "device" not in own and not NativeEngine(device="auto").on_gpu(drafter, found=True):
        return Choice({**own, "type": "native"}, f"drafter={drafter.kind} so set needs our engine on a CPU")
    share = own.get("memory", NativeEngine().memory)
    if runs_vllm() and path is not None and (why := _better_in_vllm(path, share, rollout)):
        return Choice({**own, "type": "vllm"}, why)
    return Choice({"device": "cuda", **own, "type": "native"}, "our decoder knows the model, and one GPU holds it")


def engine_for(raw: Mapping[str, Any]) -> Choice:
    """The same for a run that is not loaded yet. What is wrong with its settings is said when it is."""
    rollout, drafter = _given(raw, "rollout", Rollout, Rollout()), _given(raw, "drafter", DrafterSettings, NoDrafter())
    return choose_engine(raw.get("model") or {}, raw["engine"], rollout, drafter)


def _given(raw: Mapping[str, Any], part: str, kind: Any, default: T) -> T:
    try:
        return msgspec.convert(raw.get(part), kind)
    except msgspec.ValidationError:
        return default


def why_engine(run: Run) -> str:
    """A line about the run's engine and the one that `engine=auto` takes here."""
    choice = choose_engine(msgspec.to_builtins(run.model), {}, run.rollout, run.drafter)
    auto = f"engine=auto takes {choice.settings['type']} here"
    same = choice.settings["type"] == run.engine.kind
    return f"engine: {run.engine.label}{', as ' if same else '; '}{auto}, because {choice.why}"


def _better_in_vllm(path: Path, share: float, rollout: RolloutPrecision) -> str:
    """Why vLLM is the choice for a model of ours on a GPU; empty if it is not."""
    try:
        model = read_config(path)
        if model.experts is not None:
            if any(VllmEngine().expert_problems(rollout.precision, model.hidden_size, gpu=True)):
                return ""
            return "the model has experts, with which vLLM is faster"
        weights = footprint(model, sum(tensor_sizes(path).values()), rollout.precision, rollout.fp8).weights
    except CheckpointError:
        return ""  # refused elsewhere
    memory = gpu_memory()
    if memory is not None and weights > FULL * share * memory:
        return f"{weights / 1e9:.0f} GB of weights are too many for engine.memory={share:g} of one GPU"
    return ""


def build_engine(
    run: Run, model_path: Path, *, name: str, tap: "RolloutTap | None" = None, learned: Sequence[Range] = ()
) -> Engine:
    build: Build = _load(ENGINES[type(run.engine)].build)
    return build(
        model_path,
        run.engine,
        run.drafter,
        name=name,
        precision=run.rollout.precision,
        fp8=run.rollout.fp8,
        tap=tap,
        learned=learned,
        adapted=published_adapters(run),
        routes=run.replays_routes,
    )


def problems(run: Run) -> Iterator[str]:
    """What stands in the way of the run's engine on this machine."""
    if where := ENGINES[type(run.engine)].problems:
        find: Callable[[Run, Any], Iterator[str]] = _load(where)
        yield from find(run, run.engine)


def _load(location: str) -> Any:
    module, name = location.split(":")
    return getattr(import_module(module), name)
