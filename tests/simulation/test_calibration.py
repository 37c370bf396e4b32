"""Costs are found in what a run leaves behind; `asyncrl simulate` says what it would cost elsewhere."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from asyncrl.config import WarmStart
from asyncrl.config.task import ChainsTask
from asyncrl.simulation.calibration import calibrate
from asyncrl.simulation.decoding import Decoding
from asyncrl.simulation.loop import simulate
from asyncrl.simulation.profile import Affine, Recorded
from asyncrl.simulation.recordings import Sample, sent
from asyncrl.system.run_directory import RunDirectory
from asyncrl.training.warm_start import make_model
from pipelines.cli import main
from pipelines.compose import from_yaml
from tests.support import quickstart_runs

COIN = Path(__file__).parents[2] / "benchmarks" / "coin.py"
Call = Callable[..., tuple[int, str, str]]


def wave(engine: str, begin: float, tokens: list[int], pace: Callable[[int], float]) -> list[Sample]:
    """Answers that begin together and leave the batch one after the other."""
    found: list[Sample] = []
    now, done = begin, 0
    for place, length in enumerate(sorted(tokens)):
        now += (length - done) * pace(len(tokens) - place)
        done = length
        found.append(Sample(place, engine, begin, now, length, 5, 0.0))
    return found


def test_the_pace_of_an_engine_is_found_in_its_answers() -> None:
    samples = [
        sample
        for rows in (1, 2, 5, 20, 40)
        for sample in wave(f"rollout-{rows % 2}", 100.0 * rows, [50] * rows, lambda b: 0.01 + 0.002 * b)
    ]
    found = Decoding(samples, 64).step(0.0)
    assert [found.at(rows) for rows in (1, 40)] == pytest.approx([0.012, 0.09], rel=0.01)


def test_answers_that_wait_for_a_row_do_not_count_as_slow() -> None:
    """Three waves of 4 in an engine of 4 rows, all given at once: 0.02 s a step."""
    samples = [Sample(i, "rollout-0", 0.0, (i // 4 + 1) * 50 * 0.02, 50, 5, 0.0) for i in range(12)]
    assert Decoding(samples, 4).step(0.0).at(4) == pytest.approx(0.02)


def test_finished_answers_leave_an_engine_together() -> None:
    """Those of the next 0.05 s go with the first one."""
    times = [(0, 1.0), (0, 1.04), (1, 1.051), (1, 1.02), (2, 1.09)]
    samples = [Sample(group, "rollout-0", 0.0, time, 9, 5, 0.0) for group, time in times]
    other = Sample(2, "rollout-1", 0.0, 1.03, 9, 5, 0.0)
    assert sent([*samples, other], gather=0.05) == pytest.approx({0: 1.05, 1: 1.101, 2: 1.101})


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of the fake engine, in which steps take time."""
    root = tmp_path_factory.mktemp("simulated")
    model = make_model(WarmStart(steps=1), ChainsTask(), 0, root / "model")
    settings = ("steps=8", "max_staleness=1", "flow.groups_per_take=2", "evaluation.prompts=0", "checkpoint.every=0")
    fake = ("engine=fake", "engine.vocabulary=8", "engine.step_seconds=0.005", "rollout.max_tokens=60")
    coin = (f"reward.function={COIN}:reward", "sentinel.max_kl=0")
    quickstart_runs.run(root, model, *settings, *fake, *coin)
    return root / "run"


def test_a_run_is_measured(recorded: Path) -> None:
    directory = RunDirectory.open(recorded)
    settings = from_yaml(directory.config)
    profile = calibrate(directory, settings)
    assert isinstance(profile.lengths, Recorded)
    assert len(profile.lengths.groups) >= 8 * 4
    assert isinstance(profile.engine.step, Affine)
    assert profile.engine.step.at(1) >= 0.004  # its pace is 0.005, but the first token of an answer comes at once
    assert profile.trainer.per_take + profile.trainer.per_token > 0
    assert 0 <= profile.trainer.per_ask < 5
    assert 0 < profile.engine.begin_seconds < 5
    assert profile.sync.seconds > 0
    assert 0 < profile.informative < 1
    found = simulate(settings, profile)
    assert found.rates.staleness_max <= 1
    assert found.rates.samples_per_second > 0


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    monkeypatch.chdir(tmp_path)

    def said(*words: str | Path) -> tuple[int, str, str]:
        code = main(["simulate", *map(str, words)])
        return code, *capsys.readouterr()

    return said


def test_from_a_run_to_a_profile_to_a_split(recorded: Path, call: Call) -> None:
    code, out, _ = call("--from", recorded, "--save", "costs.yaml", "--steps", 3)
    assert code == 0
    assert "SIMULATED" in out
    code, out, _ = call(
        *("rollout.group_size=4", "flow.groups_per_step=4", "flow.groups_per_take=1", "max_staleness=2"),
        *("profile.trainer.per_token=0.01", "--profile", "costs.yaml", "--gpus", 8, "--steps", 3, "--json"),
        *("--out", "split.html"),
    )
    found = json.loads(out)
    assert (code, found["simulated"], found["gpus"]) == (0, True, 8)
    assert all(split["simulated"] for split in found["splits"])
    assert all(split["rollout_gpus"] + split["trainer_gpus"] == 8 for split in found["splits"])
    rates = [split["rates"]["samples_per_second"] for split in found["splits"]]
    assert max(rates) == rates[found["best"]]
    assert "SIMULATED" in Path("split.html").read_text()


def test_other_settings_of_a_recorded_run(recorded: Path, call: Call) -> None:
    outcomes = [
        json.loads(call("--from", recorded, f"max_staleness={k}", "--steps", 8, "--json")[1])["rates"] for k in (0, 3)
    ]
    assert [each["staleness_max"] <= k for each, k in zip(outcomes, (0, 3), strict=True)] == [True, True]
    assert outcomes[0]["trainer_wait"] > outcomes[1]["trainer_wait"]


@pytest.mark.parametrize("name", ["h20_7b", "gb200_8b", "gb200_235b_a22b", "h200_30b_a3b"])
def test_profiles_that_come_along(name: str, call: Call) -> None:
    code, out, err = call(
        *("rollout.group_size=4", "flow.groups_per_step=8", "rollout.max_tokens=20000", "flow.group_timeout_s=9999"),
        *("--profile", name, "--gpus", 64, "--trainer-gpus", 32, "--steps", 2),
    )
    assert (code, err) == (0, "")
    assert "32 : 32" in out


@pytest.mark.parametrize("name", ["h100_8b", "h100_30b_a3b", "h100_235b_a22b"])
def test_shipped_clusters_of_h100_and_h200(name: str, call: Call) -> None:
    """Fewer samples than GPUs, so that it is quick; faster memory generates faster."""
    steps: list[float] = []
    for hardware in ("h100", "h200"):
        code, out, err = call(
            *("--profile", name, f"profile.hardware.type={hardware}", "--gpus", "256", "--trainer-gpus", "128"),
            *("flow.groups_per_step=8", "rollout.group_size=8", "max_staleness=0", "--steps", "1", "--json"),
        )
        assert (code, err) == (0, "")
        steps.append(json.loads(out)["rates"]["step_seconds"])
    assert steps[1] < steps[0]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "--from RUN measures a finished run, --profile takes a file or one of gb200_235b_a22b, gb200_8b, h100_"),
        (("--profile", "h20"), "--profile h20 is no file and not shipped: did you mean h20_7b?"),
        (("--profile", "bad.yaml"), "profile: unknown key engine.steps: did you mean engine.step?"),
        (("--profile", "h20_7b", "profile.sync.pause=9"), "pause=9 is a part of seconds=4.2"),
        (("--profile", "h20_7b", "profile.lengths.sigma=-1"), "lengths.sigma"),
        (("--profile", "gb200_235b_a22b", "profile.engine.step.active=129"), "active=129 is more than experts=128"),
        (("--profile", "h20_7b", "profile.trainer.flops=1.0e+14"), "active_parameters and flops go together"),
        (("--profile", "h200_30b_a3b", "profile.trainer.per_token=1"), "per_token is what active_parameters / flops"),
        (("--profile", "h20_7b", "profile.trainer.gpus.x=1"), "profile.gpus is a single value"),
        (("--profile", "h20_7b", "--gpus", "4"), "--gpus 4 cannot be split"),
        (
            ("--profile", "h100_8b", "profile.hardware.type=h300"),
            "hardware.type=h300: invalid value 'h300'; use one of",
        ),
        (
            ("--profile", "h100_235b_a22b", "--gpus", "64"),
            "56 GPUs of 80 GB are too few for the trainer's 3,761 GB: give it 64",
        ),
        (
            ("--profile", "h100_30b_a3b", "--gpus", "32", "--trainer-gpus", "10"),
            "10 GPUs of the trainer are no multiple of 8",
        ),
        (("--profile", "h20_7b", "--gpus", "8", "--trainer-gpus", "6"), "--trainer-gpus 6 of --gpus 8 leaves no"),
        (("--profile", "h20_7b", "max_stalenes=1"), "unknown key max_stalenes: did you mean max_staleness?"),
        (("--from", "nowhere"), "nowhere is not a run directory"),
    ],
)
def test_refusals_name_the_field(words: tuple[str, ...], complaint: str, call: Call) -> None:
    Path("bad.yaml").write_bytes(msgspec.yaml.encode({"engine": {"steps": 1}}))
    code, _, err = call(*words)
    assert code == 2
    assert complaint in err
