"""The sentence names what bounds a run, in runs where that is known."""

import re
from pathlib import Path

import pytest

from asyncrl.drop_reasons import describe
from asyncrl.observe.report.document import document
from asyncrl.observe.report.figures import Found
from asyncrl.observe.report.headline import Figures, headline
from asyncrl.observe.report.recorded import read
from pipelines.compose import compose, to_yaml
from tests.support.synthetic_runs import CASES, Scenario, write_run

NAMED = {
    "generation": ("Generation bounds", "rollout.replicas=3"),
    "tail": ("The long tail bounds", "max_staleness=1"),
    "reward": ("The reward function bounds", "reward.workers=2"),
    "training": ("Training bounds", "rollout.replicas=1"),
    "sync": ("Weight sync bounds", "staleness=ess"),
    "stale": ("Stale drops bound", "max_staleness=2"),
}

BESIDE = {
    "weights.delta=true": ["weights.transport=file"],
    "weights.transport=nccl": ["engine.device=cuda", "trainer.device=cuda"],
}
"""What those have who are given such advice."""


@pytest.mark.parametrize("bound", NAMED)
def test_the_headline_names_the_bottleneck(bound: str, tmp_path: Path) -> None:
    found = document(read(write_run(tmp_path, CASES[bound])))["headline"]
    words, setting = NAMED[bound]
    assert found["bound"] == bound
    assert found["sentence"].startswith(words)
    assert setting in found["advice"]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("bound", NAMED)
def test_it_does_so_for_other_sizes_and_seeds(bound: str, seed: int, tmp_path: Path) -> None:
    scenario = Scenario(**(vars(CASES[bound]) | {"groups": 8, "group_size": 8, "workers": seed, "engines": 1 + seed}))
    if bound == "reward":
        scenario = Scenario(**(vars(scenario) | {"reward": 0.5 * seed}))
    assert headline(Found(read(write_run(tmp_path, scenario, seed=seed))).figures()).bound == bound


def test_every_moment_of_the_loop_has_one_cause(tmp_path: Path) -> None:
    run = read(write_run(tmp_path, CASES["stale"]))
    found = Found(run)
    events = {event["kind"]: event["time"] for event in run.events}
    assert sum(found.pieces.seconds().values()) == pytest.approx(events["loop_ended"] - events["loop_started"])
    assert (found.pieces.starts[1:] >= found.pieces.ends[:-1] - 1e-6).all()
    trained = sum(e["seconds"] for e in run.events if e["kind"] in ("train", "update"))
    assert found.pieces.seconds()["training"] == pytest.approx(trained)


def test_evidence_is_in_numbers(tmp_path: Path) -> None:
    figures = Found(read(write_run(tmp_path, CASES["sync"]))).figures()
    assert figures.sync_seconds == pytest.approx(5.0)
    assert figures.shares["sync"] == pytest.approx(0.93, abs=0.03)
    assert "5.0 s for a version" in headline(figures).sentence
    figures = Found(read(write_run(tmp_path, CASES["reward"], name="reward"))).figures()
    assert figures.reward_busy > 0.9
    assert figures.reward_seconds > 5


def test_a_run_without_steps_says_so() -> None:
    found = headline(Figures(steps=0, loop_seconds=0.0, shares={}))
    assert found.bound == "nothing"
    assert found.sentence.startswith("No step is finished yet")


def test_drops_for_other_reasons_are_told_beside() -> None:
    shares = {"training": 0.8, "generation": 0.05}
    found = headline(Figures(steps=3, loop_seconds=9.0, shares=shares, drops={"timeout": 0.3, "stale": 0.25}))
    assert found.bound == "training"  # the trainer does not wait, so drops cost engines, not time
    assert found.beside[0] == f"30% of the sampled tokens were dropped as timeout: {describe('timeout').meaning}."
    assert found.beside[1] == f"25% of the sampled tokens were dropped as stale: {describe('stale').meaning}."


@pytest.mark.parametrize("on_gpu", [False, True])
def test_settings_that_are_advised_exist(on_gpu: bool) -> None:
    advised = set[str]()
    for bound in ("generation", "tail", "reward", "training", "sync", "stale", "checkpoint", "other"):
        drops = {"stale": 0.5} if bound == "stale" else {}
        shares = {"generation" if drops else bound: 0.9}
        figures = Figures(
            steps=3, loop_seconds=9.0, shares=shares, drops=drops, engines=4, engines_idle=0.5, waiting=3.0,
            max_staleness=1, transport="file", on_gpu=on_gpu,
        )  # fmt: skip
        found = headline(figures)
        assert found.bound == bound
        advised |= set(re.findall(r"\b(?:[a-z_]+\.)+[a-z_]+(?:=\w+)?|\b[a-z_]+=\w+", found.advice))
    assert len(advised) >= 10
    settings = to_yaml(compose(["experiment=quickstart"]))
    for setting in advised:
        name, _, value = setting.partition("=")
        if value:
            compose(["experiment=quickstart", *BESIDE.get(setting, ()), setting])
        else:
            assert re.search(rf"^ +{name.rpartition('.')[2]}:", settings, re.MULTILINE), setting
