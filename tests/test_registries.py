"""One registry for each kind of thing that is chosen by name: nothing is missing, nothing is dead, and one is added
with a file and a line."""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch

from asyncrl.algorithms import registry as algorithms
from asyncrl.algorithms.advantages import Rewards
from asyncrl.algorithms.base import Loss, Samples, Tokens
from asyncrl.algorithms.corrections import Corrected, log_ratio
from asyncrl.config import Run
from asyncrl.config import trackers as tracker_traits
from asyncrl.config import weights as transport_traits
from asyncrl.config.algorithm import Algorithm, AlgorithmBase, Correction, CorrectionBase
from asyncrl.config.base import Chosen
from asyncrl.config.drafter import DrafterSettings
from asyncrl.config.engine import EngineBase, EngineSettings
from asyncrl.config.run import PIPELINES, ModelSource
from asyncrl.config.staleness import StalenessControl
from asyncrl.config.task import TaskBase, TaskSettings
from asyncrl.config.trackers import TrackerName
from asyncrl.config.weights import TransportName
from asyncrl.engines import registry as engines
from asyncrl.observe.trackers import registry as trackers
from asyncrl.observe.trackers.base import Figures, Session
from asyncrl.system.run_directory import RunDirectory
from asyncrl.tasks import registry as tasks
from asyncrl.tasks.base import Split
from asyncrl.training.advantages import with_advantages
from asyncrl.types import Group, Prompt, Segment, SendOrder, Slot, Trajectory, WeightManifest
from asyncrl.weights.flat import Flat
from asyncrl.weights.gather import Tensors
from asyncrl.weights.transports import registry as transports
from asyncrl.weights.transports.base import Transport, WriterOptions
from asyncrl.weights.transports.mirror import sealed
from pipelines import registry as pipelines
from pipelines.compose import CONFIGS, compose
from pipelines.plan import plan
from pipelines.recording import recorder

UNIONS: dict[str, UnionType] = {
    "engine": EngineSettings,
    "algorithm": Algorithm,
    "correction": Correction,
    "drafter": DrafterSettings,
    "task": TaskSettings,
    "model": ModelSource,
    "staleness": StalenessControl,
}
HERE = __name__


def _imported(location: str) -> Callable[..., Any]:
    module, name = location.split(":")
    return getattr(import_module(module), name)


@pytest.mark.parametrize(
    ("kind", "registry"),
    [
        ("engine", engines.ENGINES),
        ("task", tasks.TASKS),
        ("algorithm", algorithms.ALGORITHMS),
        ("correction", algorithms.CORRECTIONS),
    ],
)
def test_every_settings_type_has_an_entry_and_every_entry_a_type(kind: str, registry: dict[type, Any]) -> None:
    assert set(registry) == set(get_args(UNIONS[kind]))


@pytest.mark.parametrize(
    ("literal", "registry"),
    [
        (TransportName, transports.TRANSPORTS),
        (TransportName, transport_traits.TRANSPORTS),
        (TrackerName, trackers.TRACKERS | recorder.RAY_TRACKERS),
        (TrackerName, tracker_traits.TRACKERS),
    ],
    ids=["transports", "their traits", "trackers", "their traits"],
)
def test_every_name_has_an_entry_and_every_entry_a_name(literal: Any, registry: dict[str, Any]) -> None:
    assert set(registry) == set(get_args(literal))


def test_every_pipeline_has_a_name_and_a_config() -> None:
    assert set(pipelines.PIPELINES) == set(PIPELINES) == {path.stem for path in (CONFIGS / "pipeline").glob("*.yaml")}
    needed = {"sft": ["sft.path=chats.jsonl"], "distill": ["teachers=[{path: big}]"]}
    assert all(compose([f"pipeline={name}", *needed.get(name, [])]).pipeline == name for name in PIPELINES)


def _locations() -> Iterator[str]:
    for entry in engines.ENGINES.values():
        yield from filter(None, entry)
    yield from tasks.TASKS.values()
    yield from pipelines.PIPELINES.values()
    yield from (trackers.TRACKERS | recorder.RAY_TRACKERS).values()


@pytest.mark.parametrize("location", list(_locations()))
def test_every_entry_can_be_imported(location: str) -> None:
    assert callable(_imported(location))


@pytest.mark.parametrize("kind", UNIONS)
def test_everything_that_can_be_chosen_has_a_config_and_says_its_name(kind: str) -> None:
    members: tuple[type[Chosen], ...] = get_args(UNIONS[kind])
    assert all(issubclass(member, Chosen) for member in members)
    files = "".join(path.read_text() for path in (CONFIGS / kind).glob("*.yaml"))
    for member in members:
        name = str(member.__struct_config__.tag)
        assert member.__struct_config__.tag_field == "type"
        assert f"type: {name}\n" in files, f"no configs/{kind}/*.yaml chooses {name}"


def test_schemes_of_transports_are_told_apart() -> None:
    schemes = [each.scheme for each in transports.TRANSPORTS.values()]
    assert len(set(schemes)) == len(schemes)


def test_nothing_in_the_core_is_chosen_by_a_missing_reward() -> None:
    judges = {member.judge for member in get_args(TaskSettings)} - {""}
    for judge in judges:
        assert find_spec(judge.split(":")[0]) is not None


# One of each kind, as somebody would add it: settings, a file (this one) and a line.


class Canned(EngineBase, frozen=True, kw_only=True, tag="canned"):
    """An engine."""

    max_batch: int = 3


def build_canned(model_path: Path, settings: Canned, drafter: Any, *, name: str, **_: Any) -> Any:
    return f"{name} for {settings.max_batch}"


def canned_problems(run: Run, settings: Canned) -> Iterator[str]:
    yield f"engine={settings.kind} is not opened yet"


def _run(**changed: Any) -> Run:
    """`Run` takes any settings as an argument; a config takes those of its unions."""
    return msgspec.structs.replace(Run(), **changed)


def test_an_engine_is_added_by_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry = engines.Entry(f"{HERE}:build_canned", problems=f"{HERE}:canned_problems")
    monkeypatch.setitem(engines.ENGINES, Canned, entry)
    run = _run(engine=Canned(), root=str(tmp_path))
    built: Any = engines.build_engine(run, tmp_path, name="e0")
    assert built == "e0 for 3"
    assert "engine=canned is not opened yet" in plan.problems(run)


class Countdown(TaskBase, frozen=True, tag="countdown"):
    """A task."""

    start: int = 3


class CountdownTask:
    def __init__(self, settings: Countdown, seed: int) -> None:
        self._start = settings.start + seed

    def prompt(self, split: Split, index: int) -> Prompt:
        return Prompt(uid=f"{split}/{index}", text=str(self._start - index))


def test_a_task_is_added_by_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.TASKS, Countdown, f"{HERE}:CountdownTask")
    assert tasks.make_task(Countdown(), seed=4).prompt("train", 1).text == "6"


class Sign(AlgorithmBase, frozen=True, tag="sign"):
    """An algorithm."""


def sign_advantages(settings: Sign, rewards: Sequence[Rewards]) -> list[Rewards]:
    return [np.sign(reward_G - 0.5) for reward_G in rewards]


def sign_loss(settings: Sign, tokens: Tokens) -> Loss:
    return Loss(-tokens.advantage_L * tokens.logp_L)


def _group(*rewards: float) -> Group:
    def sample(number: int, reward: float) -> Trajectory:
        segments = (Segment.given([1, 2]), Segment.sampled([3], [-1.0], 0))
        return Trajectory(
            slot=Slot(0, number),
            prompt="p",
            segments=segments,
            reward=reward,
            finish="stop",
            started=0.0,
            finished=1.0,
            engine="e",
        )

    return Group(id=0, trajectories=tuple(sample(number, reward) for number, reward in enumerate(rewards)))


def test_an_algorithm_is_added_by_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(algorithms.ALGORITHMS, Sign, algorithms.Entry(sign_advantages, sign_loss))
    (block,) = with_advantages(_run(algorithm=Sign()), [_group(0.2, 0.9)])
    assert [set(answer.advantages.tolist()) for answer in block.answers] == [{-1.0}, {1.0}]
    tokens = Tokens(torch.tensor([-2.0]), torch.tensor([-2.0]), torch.tensor([3.0]), _samples(1))
    assert algorithms.entry(Sign()).loss(Sign(), tokens).loss_L.tolist() == [6.0]


class Halved(CorrectionBase, frozen=True, tag="halved"):
    """A correction."""


def halved(settings: Halved, logp_L: torch.Tensor, behaviour_logp_L: torch.Tensor, samples: Samples) -> Corrected:
    weight_L = torch.full_like(logp_L, 0.5)
    none_L = torch.zeros_like(logp_L, dtype=torch.bool)
    return Corrected(log_ratio(logp_L, behaviour_logp_L), logp_L, weight_L, ~none_L, none_L)


def _samples(count: int) -> Samples:
    return Samples(torch.arange(count), count, torch.zeros(count, dtype=torch.int64))


def test_a_correction_is_added_by_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(algorithms.CORRECTIONS, Halved, halved)
    found = algorithms.correct(Halved(), torch.zeros(2), torch.ones(2), _samples(2))
    assert found.weight_L.tolist() == [0.5, 0.5]
    assert found.log_rho_L.tolist() == [-1.0, -1.0]


class Pigeon(Transport):
    """A transport."""

    scheme = "pigeon:"

    def __init__(self) -> None:
        self.loft: dict[str, Flat] = {}

    def writer(self, tensors: Tensors, options: WriterOptions) -> "PigeonWriter":
        assert callable(tensors)
        return PigeonWriter(self, dict(tensors()), options.prefix)

    def read(self, manifest: WeightManifest) -> Flat:
        return self.loft[manifest.location]

    def addressed(self, manifest: WeightManifest, name: str) -> str:
        return manifest.location if name == "e0" else "pigeon:lost"


class PigeonWriter:
    def __init__(self, transport: Pigeon, tensors: dict[str, torch.Tensor], prefix: str) -> None:
        self._transport, self._tensors, self._prefix = transport, tensors, prefix

    def publish(self, version: int, order: SendOrder | None = None) -> WeightManifest:
        from asyncrl.weights.manifest import layout

        specs, total = layout(self._tensors.items())
        flat = Flat.empty(specs, total)
        for spec in specs:
            flat.put(spec, self._tensors[spec.name])
        location = f"pigeon:{self._prefix}/{version}"
        self._transport.loft[location] = flat
        return msgspec.structs.replace(sealed(version, flat), location=location)

    def close(self) -> None:
        self._transport.loft.clear()


def test_a_transport_is_added_by_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(transports.TRANSPORTS, "pigeon", Pigeon())
    name: Any = "pigeon"
    writer = transports.make_writer(lambda: [("w", torch.arange(6.0))], name, prefix="run")
    manifest = transports.addressed_to(writer.publish(7), "e0")
    assert transports.digest_published(manifest) == manifest.digest
    ((_, tensor),) = transports.read_published(manifest, torch.device("cpu"))
    assert tensor.tolist() == [0, 1, 2, 3, 4, 5]
    assert transports.serves_late_joiners(manifest)
    assert transports.addressed_to(manifest, "e1").location == "pigeon:lost"
    late = transports.to_file(manifest, tmp_path)
    assert transports.digest_published(late) == manifest.digest
    writer.close()


class Diary:
    """A tracker."""

    def __init__(self, session: Session) -> None:
        self._path = session.home / "diary"

    def step(self, step: int, figures: Figures) -> None:
        self._path.write_text(f"step {step}: {figures['reward']}")

    def evaluation(self, step: int, scores: Figures) -> None: ...

    def note(self, step: int, text: str) -> None: ...

    def close(self) -> None: ...


def test_a_tracker_is_added_by_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "diary", f"{HERE}:Diary")
    monkeypatch.setitem(tracker_traits.TRACKERS, "diary", tracker_traits.TrackerTraits(("msgspec",), "msgspec"))
    assert list(tracker_traits.problems(("diary",), "local")) == []  # pyright: ignore[reportArgumentType]
    said: list[str] = []
    tracked = recorder.trackers(_run(trackers=("diary",)), RunDirectory(tmp_path), said.append, first_step=0)
    row = {"step": 2, "loop_seconds": 1.0, "generated_tokens": 5, "samples": 4, "wait_seconds": 0.1, "reward": 0.75}
    tracked.step(row, None)
    assert (tracked.close(), said) == ({}, [])
    assert (tmp_path / "tracking" / "diary").read_text() == "step 2: 0.75"
