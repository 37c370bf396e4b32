"""Trackers for real: what they stored is read back, and one that raises or hangs costs the run nothing."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import load
from asyncrl.config.trackers import problems
from asyncrl.errors import ConfigError
from asyncrl.observe.trackers import async_tracker, registry
from asyncrl.observe.trackers.base import Figures, Session, Tracker, numbers, of_step
from asyncrl.observe.trackers.registry import TRACKERS, Trackers, opener
from tests.support import needs


def _row(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "time": 1e9,
        "loop_seconds": 2.0 * (step + 1),
        "generated_tokens": 300 * (step + 1),
        "samples": 16,
        "wait_seconds": 0.5,
        "reward": step / 10,
        "skipped": False,
        "speculation_net_gain": None,
        "shares": [{"ess": 1.0}],
        "drafter": {"updates": 3, "kind": "eagle"},
    }


def _session(root: Path, first_step: int = 0) -> Session:
    directory = root / "runs" / "mine"
    directory.mkdir(parents=True, exist_ok=True)
    return Session(name="mine", project="tests", directory=directory, config={"a": {"b": 1}}, first_step=first_step)


def _track(name: str, session: Session, steps: range) -> None:
    """As a run does it, up to its end or its death."""
    said: list[str] = []
    tracked = Trackers({name: opener(TRACKERS[name], session)}, said.append)
    for step in steps:
        tracked.step(_row(step), _row(step - 1) if step else None)
    tracked.evaluation(steps.stop, {"sampled": 0.5, "by_size": {"1-3": 0.75}})
    tracked.note("an alarm")
    assert (tracked.close(), said) == ({}, [])


def _twice(name: str, root: Path) -> None:
    """Three steps, of which the last is said again when the run is resumed."""
    _track(name, _session(root), range(3))
    _track(name, _session(root, first_step=2), range(2, 4))


def test_figures_by_hand() -> None:
    figures = of_step(_row(1), _row(0))
    assert figures["step_seconds"] == 2.0
    assert figures["samples_per_second"] == 16 / 2
    assert figures["generated_tokens_per_second"] == 300 / 2
    assert figures["wait_fraction"] == 0.25
    assert figures["drafter/updates"] == 3.0
    assert figures["skipped"] == 0.0
    assert not {"step", "time", "shares", "speculation_net_gain", "drafter/kind"} & figures.keys()
    assert of_step(_row(0), None)["generated_tokens_per_second"] == 150
    assert numbers({"a": {"b": {"c": 1}}}) == {"a/b/c": 1.0}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_events_are_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason=needs.package("tensorboard"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _twice("tensorboard", tmp_path)
    (place,) = tmp_path.rglob("tracking/tensorboard")
    found: Any = EventAccumulator(str(place), purge_orphaned_data=True).Reload()
    rewards = [(each.step, round(each.value, 3)) for each in found.Scalars("step/reward")]
    assert rewards == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)]  # step 2 once, although it was said twice
    assert [each.value for each in found.Scalars("evaluation/by_size/1-3")][-1] == 0.75
    assert found.Tensors("notes/text_summary")[-1].tensor_proto.string_val == [b"an alarm"]


def test_mlflow_continues_one_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason=needs.package("mlflow"))
    _twice("mlflow", tmp_path)
    from mlflow.tracking import MlflowClient

    client: Any = MlflowClient(tracking_uri=(tmp_path / "runs" / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params) == ("mine", "FINISHED", {"a.b": "1"})
    assert {each.step for each in client.get_metric_history(run.info.run_id, "step/reward")} == {0, 1, 2, 3}
    assert run.data.metrics["evaluation/sampled"] == 0.5
    assert run.data.tags["mlflow.note.content"] == "- step 2: an alarm\n- step 3: an alarm\n"


def test_trackio_continues_one_run(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason=needs.package("trackio"))
    _twice("trackio", tmp_path)
    from trackio.sqlite_storage import SQLiteStorage

    storage: Any = SQLiteStorage
    (run,) = storage.get_runs("tests")
    assert run.startswith("mine-")
    logged = [row for row in storage.get_logs("tests", run) if "step/reward" in row]
    assert {row["step"] for row in logged} == {0, 1, 2, 3}


def test_wandb_without_a_key_stays_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    pytest.importorskip("wandb", reason=needs.package("wandb"))
    _twice("wandb", tmp_path)
    written = list(tmp_path.rglob("offline-run-*/run-*.wandb"))
    assert len(written) == 2
    assert len({path.name for path in written}) == 1  # one id: `wandb sync` makes one run of them
    assert any(b"step/reward" in path.read_bytes() for path in written)  # the end of a block may cut a name in two


class _Kept:
    """A tracker in memory."""

    def __init__(self, before: Callable[[int], None] = lambda step: None) -> None:
        self.steps: list[int] = []
        self.closed = threading.Event()
        self._before = before

    def step(self, step: int, figures: Figures) -> None:
        self._before(step)
        self.steps.append(step)

    def evaluation(self, step: int, scores: Figures) -> None: ...

    def note(self, step: int, text: str) -> None: ...

    def close(self) -> None:
        self.closed.set()


def _feed(tracked: Trackers, steps: int) -> None:
    for step in range(steps):
        tracked.step(_row(step), None)


def test_one_that_raises_is_said_once_and_counted(tmp_path: Path) -> None:
    def refuse_odd(step: int) -> None:
        if step % 2:
            raise OSError(28, "No space left on device")

    said: list[str] = []
    kept = _Kept(refuse_odd)
    tracked = Trackers({"kept": lambda: kept}, said.append)
    _feed(tracked, 10)
    assert tracked.close() == {"kept": 5}
    assert kept.steps == [0, 2, 4, 6, 8]
    assert kept.closed.is_set()
    (warning,) = said
    assert warning.startswith("tracker kept failed with OSError: [Errno 28] No space left on device; the run goes on")


def test_one_that_opens_late_gets_the_rest() -> None:
    kept, tries = _Kept(), [ConnectionError("refused"), ConnectionError("refused")]

    def open_third_time() -> Tracker:
        if tries:
            raise tries.pop()
        return kept

    tracked = Trackers({"kept": open_third_time}, lambda text: None)
    _feed(tracked, 5)
    assert tracked.close() == {"kept": 2}
    assert kept.steps == [2, 3, 4]


def test_one_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_tracker, "WAITING", 3)
    monkeypatch.setattr(registry, "CLOSE_S", 0.05)
    released, hanging = threading.Event(), threading.Event()

    def hang(step: int) -> None:
        hanging.set()
        released.wait()

    said: list[str] = []
    stuck, other = _Kept(hang), _Kept()
    tracked = Trackers({"stuck": lambda: stuck, "other": lambda: other}, said.append)
    _feed(tracked, 1)
    assert hanging.wait(10)
    _feed(tracked, 8)  # three wait, five are dropped
    lost = tracked.close()
    assert lost["stuck"] == 1 + 3 + 5
    assert [text for text in said if "stuck" in text] == [
        "tracker stuck is slow, 3 records wait for it; the run goes on, and counts what it loses"
    ]
    released.set()
    assert stuck.closed.wait(10)  # its thread ends by itself once it is let go


def test_without_trackers_no_thread_is_started() -> None:
    before = threading.active_count()
    tracked = Trackers({}, lambda text: None)
    _feed(tracked, 2)
    assert (threading.active_count(), tracked.close()) == (before, {})


def test_a_missing_package_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("asyncrl.config.trackers.find_spec", lambda name: None)
    (problem,) = problems(("wandb",), "local")
    assert problem == "trackers=[wandb] needs wandb: pip install 'asyncrl[wandb]', or leave it out"
    (problem,) = problems(("prometheus",), "local")
    assert problem == "trackers=[prometheus] needs ray[default]: pip install 'asyncrl[prometheus]', or leave it out"
    monkeypatch.undo()
    assert "use cluster=local" in next(problems(("prometheus",), "inprocess"))


def test_a_folder_is_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """wandb leaves ./wandb where it runs."""
    from asyncrl.config import trackers

    (tmp_path / "a_mere_folder").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not trackers.is_installed("a_mere_folder")
    assert trackers.is_installed("msgspec")


def test_an_unknown_tracker_is_refused_with_the_known_ones() -> None:
    assert load({"trackers": ["tensorboard"]}).trackers == ("tensorboard",)
    with pytest.raises(ConfigError, match=r"trackers\[0\]=tensorbord.*tensorboard, trackio, wandb"):
        load({"trackers": ["tensorbord"]})
