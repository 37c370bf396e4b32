"""What a study of learning runs, keeps and says, by hand."""

from pathlib import Path

import pytest

from benchmarks import learning
from benchmarks.runs import Point
from benchmarks.studies import Study
from pipelines.compose import compose

SYNC = [Point(0, 0.0, 0.4), Point(100, 10.0, 0.8), Point(200, 20.0, 0.9), Point(400, 40.0, 0.9)]
LATE = [Point(0, 0.0, 0.4), Point(100, 5.0, 0.6), Point(200, 10.0, 0.8), Point(400, 20.0, 0.9)]


def test_an_area_by_hand() -> None:
    """60 + 85 + 180 of 400, and 50 + 70 + 170."""
    sync, late = (learning.measured(points, 0.85) for points in (SYNC, LATE))
    assert sync.area == pytest.approx(325 / 400)
    assert late.area == pytest.approx(290 / 400)
    assert sync.quarters == pytest.approx((0.8, 0.9, 0.9, 0.9))
    assert late.quarters == pytest.approx((0.6, 0.8, 0.85, 0.9))
    assert (sync.samples, sync.seconds) == pytest.approx((150, 15.0))
    assert (late.samples, late.seconds) == pytest.approx((300, 15.0))
    assert learning.measured(LATE, 0.95).samples is None


def test_the_table_compares_with_sync() -> None:
    lines = learning.table({"sync": [SYNC, SYNC], "staleness 8": [LATE, SYNC]}, 0.85).splitlines()
    assert lines[2] == "| sync | 2 | 0.812 (0.000) | 0.800 | 0.900 | 0.900 | 0.900 | 150 (0) | 15.0 (0.0) |"
    assert lines[3] == (
        "| staleness 8 | 2 | 0.769 (0.088), -4.4 points | 0.700 | 0.850 | 0.875 | 0.900 | 225 (150), 1.50x | "
        "15.0 (0.0), 1.00x |"
    )
    never = learning.table({"staleness 8": [LATE, LATE[:-1]]}, 0.85)
    assert never.endswith("reached by 1 of 2 | reached by 1 of 2 |")


def test_arms_differ_in_staleness_and_correction_alone() -> None:
    found = learning.arms([0, 2, 8], ["default", "none"])
    assert list(found) == ["sync", "staleness 2", "staleness 2, none", "staleness 8", "staleness 8, none"]
    options = learning.parse(["trainer.lr=1e-3", "--steps", "30"])
    runs = [compose([*learning.common(options), *settings]) for settings in found.values()]
    assert [run.max_staleness for run in runs] == [0, 2, 2, 8, 8]
    shared = {(run.steps, run.trainer.lr, run.evaluation.every, run.evaluation.prompts) for run in runs}
    assert shared == {(30, 1e-3, 10, 512)}
    assert runs[0].correction == runs[1].correction == runs[3].correction
    assert runs[2].correction == runs[4].correction != runs[0].correction


def test_words_are_the_long_tailed_lists_on_a_gpu(tmp_path: Path) -> None:
    options = learning.parse(["--words", str(tmp_path), "--samples", "40960"])
    run = compose([*learning.common(options), "max_staleness=2"])
    assert (run.steps, run.samples_per_step, run.rollout.max_tokens) == (80, 512, 1024)


def test_the_picture_has_every_curve_twice() -> None:
    page = learning.picture({"sync": [SYNC, SYNC], "staleness 8": [LATE]})
    assert page.count("<polyline") == 2 * (3 + 2)
    assert "staleness 8" in page
    assert "400 samples" in page


def test_a_directory_is_for_runs_of_one_kind(tmp_path: Path) -> None:
    """A run that is there is not repeated: one with another model or rate would pass for what was asked for."""
    Study(tmp_path / "runs", steps=3)
    Study(tmp_path / "runs", steps=3)
    with pytest.raises(SystemExit, match=r"holds runs with {'steps': 3}, not {'steps': 4}; give another --root"):
        Study(tmp_path / "runs", steps=4)


@pytest.mark.nightly
def test_a_small_study_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--seeds", "0", "--staleness", "0", "2", "--steps", "4", "--every", "2", "--prompts", "16"]
    small = ["flow.groups_per_step=4", "flow.groups_per_take=2", "cluster=inprocess"]
    for _ in range(2):  # the second time nothing is run
        learning.main([*small, *words, "--root", str(tmp_path)])
        assert "| staleness 2 | 1 |" in capsys.readouterr().out
    assert (tmp_path / "learning.html").read_text().count("<polyline") == 8
