"""Runs and replays side by side, as a user gets them."""

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.pipelines.test_replay import graded
from tests.support import quickstart_runs
from tests.support.command import Done, asyncrl

Compare = Callable[..., Done]


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compare:
    """`asyncrl compare` in an empty directory."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)

    return partial(asyncrl, "compare")


def cells(output: str) -> dict[str, list[str]]:
    """The lines of the printed table by their name."""
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in output.splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) > 1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, Path]:
    """A run of three steps, and its replay with another learning rate."""
    root = tmp_path_factory.mktemp("compared")
    quickstart_runs.run(root, model, "steps=3", graded(root))
    assert asyncrl("replay", root / "run", "trainer.lr=0.001", "--out", root / "fast").code == 0
    return root / "run", root / "fast"


def test_a_run_and_its_replay_stand_side_by_side(compare: Compare, runs: tuple[Path, Path]) -> None:
    done = compare(*runs)
    assert done.code == 0, done.err
    table = cells(done.out)
    summary = quickstart_runs.summary(runs[0].parent)
    assert table[""] == ["run", "fast"]
    assert table["status"] == ["ok", "ok (replay)"]
    assert table["steps"] == ["3", "3"]
    assert table["weights"] == ["-", "different"]
    assert table["samples/s"] == [f"{summary['samples_per_second']:.4g}", "-"]
    assert table["held-out sampled"][0] == f"{summary['eval_first']:.4g} -> {summary['eval_last']:.4g}"
    assert table["held-out sampled"][1] == f"{summary['eval_first']:.4g} -> -", "the replay was not evaluated"
    assert table["staleness mean"] == [f"{summary['staleness_mean']:.4g}"] * 2
    assert table["reward"][0] == table["reward"][1] == f"{summary['reward_first']:.4g} -> {summary['reward_last']:.4g}"
    assert table["trainer.lr"] == ["0.0002", "0.001"]
    assert "trainer.beta1" not in table, "settings that agree are left out"
    assert not list(Path.cwd().iterdir()), "no file unless it is asked for"


def test_the_page_holds_every_metric_and_needs_no_network(
    compare: Compare, runs: tuple[Path, Path], tmp_path: Path
) -> None:
    done = compare(*runs, "--out")
    assert done.code == 0, done.err
    page = Path("compare.html").read_text()
    for metric in ("reward", "held_out", "ess", "mismatch_kl", "staleness_mean", "loss", "grad_norm", "clip_fraction"):
        assert f'"text":"{metric}"' in page
    assert '"text":"loop_seconds"' not in page
    assert not re.search(r"<(script|link)[^>]*\b(src|href)=", page)

    losses = pq.read_table(runs[1] / "metrics.parquet")["loss"].to_pylist()
    chosen = compare(*runs, "--metric", "loss", "held_out_greedy", "--out", tmp_path / "two.html")
    assert chosen.code == 0, chosen.err
    assert cells(chosen.out)["loss mean"][1] == f"{sum(losses) / 3:.4g}"
    page = (tmp_path / "two.html").read_text()
    assert '"text":"loss"' in page
    assert '"text":"held_out_greedy"' in page
    assert '"text":"reward"' not in page


def test_a_run_that_was_killed_is_compared_by_its_steps(
    compare: Compare, runs: tuple[Path, Path], tmp_path: Path
) -> None:
    """It has no summary: what can be known comes from its metrics and events."""
    killed = tmp_path / "killed"
    shutil.copytree(runs[0], killed)
    (killed / "summary.json").unlink()
    table = cells(compare(runs[0], killed).out)
    assert table["status"] == ["ok", "unfinished"]
    assert table["samples/s"][1] == table["trainer waited"][1] == "-"
    for name in ("held-out sampled", "held-out greedy", "reward", "ess", "staleness max", "steps"):
        assert table[name][0] == table[name][1] != "-"
    assert table["settings"] == ["no difference"] * 2


def test_what_cannot_be_compared_is_refused(compare: Compare, runs: tuple[Path, Path], tmp_path: Path) -> None:
    run, replayed = runs
    unborn = tmp_path / "unborn"
    unborn.mkdir()
    shutil.copy(run / "config.yaml", unborn)
    for words, said in (
        ((run,), "nothing to be compared with: asyncrl compare RUN RUN ..."),
        ((run, tmp_path), f"{tmp_path} is not a run directory"),
        ((run, run.parent / "." / "run"), "is named twice"),
        ((run, unborn), f"{unborn} has no metrics.parquet: none of its steps is finished"),
        ((run, replayed, "--metric", "mismatch_lk"), "--metric mismatch_lk: no such figure"),
        ((run, replayed, "--metric", "mismatch_lk"), "did you mean mismatch_kl?"),
        ((run, replayed, "--out", tmp_path), f"--out {tmp_path} is not a file that can be written"),
        ((run, replayed, "--out", tmp_path / "no" / "f.html"), "is not a file that can be written"),
    ):
        refused = compare(*words)
        assert (refused.code, refused.out) == (2, ""), words
        assert said in refused.err


def test_runs_of_the_same_name_are_told_apart(compare: Compare, runs: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "run"
    shutil.copytree(runs[0], other)
    assert cells(compare(runs[0], other).out)[""] == [str(runs[0]), str(other)]
