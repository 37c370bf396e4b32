"""Every engine, by its settings. Each is imported only when chosen; nothing here needs torch.

A new one is its settings in `asyncrl.config.engine`, a file with a `Build` function, and a line here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from asyncrl.config import Run
from asyncrl.config.drafter import DrafterSettings
from asyncrl.config.engine import EngineBase, FakeEngine, NativeEngine, TransformersEngine, VllmEngine
from asyncrl.config.precision import Fp8
from asyncrl.config.weights import published_adapters
from asyncrl.drafting.bandit import Range
from asyncrl.engines.base import Engine
from asyncrl.models.config import runs_natively
from asyncrl.system.devices import default_engine

if TYPE_CHECKING:
    from asyncrl.drafting.hidden_capture import RolloutTap


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


def suitable_engine(model: Mapping[str, Any]) -> Literal["native", "vllm", "transformers"]:
    """What `engine=auto` is on this machine, for a model with these settings: transformers for what our decoder does
    not know, where vLLM is not the choice anyway."""
    chosen, path = default_engine(), model.get("path")
    return "transformers" if chosen == "native" and path and not runs_natively(Path(path).expanduser()) else chosen


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
