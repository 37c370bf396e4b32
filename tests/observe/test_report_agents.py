"""What a report and a summary say of episodes."""

import json
from pathlib import Path

import pytest

from asyncrl.buffer.journal import Admitted
from asyncrl.buffer.reader import read_run, verify
from asyncrl.observe.audit.audit import audit
from asyncrl.observe.report.agents import agents
from asyncrl.observe.report.figures import Found
from asyncrl.observe.report.recorded import read
from asyncrl.observe.report.samples import HEAD, samples
from asyncrl.observe.report.waste import useful, waste
from asyncrl.types import Branch, Episode, Turn
from pipelines.recording.report import write_report
from tests.support.browser import browser as browser
from tests.support.browser import needs_chromium, opened
from tests.support.recorded_runs import RUN_ID, answer, write_journal, write_log
from tests.support.synthetic_runs import Scenario, write_run

PLAYED = Scenario(steps=3, turns=3)
SAMPLES = 3 * 4 * 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("played"), PLAYED)


def test_figures_of_each_step_and_of_the_run(run: Path) -> None:
    found = read(run)
    of_step = {key: value for key, value in found.rows[0]["agents"].items() if key != "branches_by_cause"}
    assert of_step == pytest.approx(
        {
            "episodes": 16,
            "turns": 3.0,
            "tool_calls": 3.0,
            "model_share": 0.5,
            "tools_share": 0.25,
            "waiting_share": 0.25,
            "branches": 1.0,
            "wasted_tokens": 48,
        }
    )
    assert found.rows[0]["agents"]["branches_by_cause"] == {"history_edited": 16}
    summary = json.loads((run / "summary.json").read_text())
    assert summary["agents"]["episodes"] == SAMPLES
    assert summary["agents"]["turns"] == 3.0
    assert summary["agents"]["branches_by_cause"] == {"history_edited": SAMPLES}
    assert summary["waste"]["call_cut_off"] == summary["agents"]["wasted_tokens"] == 3 * SAMPLES


def test_the_section_is_there_for_episodes_only(run: Path, tmp_path: Path) -> None:
    found = agents(read(run))
    assert found is not None
    assert [chart["title"] for chart in found["charts"]] == [
        "Turns of an episode",
        "Turns and tool calls",
        "Time of episodes",
        "Branches",
    ]
    assert found["charts"][2]["series"][0]["y"] == pytest.approx([0.5, 0.5, 0.5])
    ((cause, branches, episodes, share),) = found["branches"]
    assert (cause, branches, share) == ("history edited", episodes, 1.0)
    assert "3.0 turns and 3.0 tool calls each: 50% of their time the model was sampling, 25%" in found["notes"][0]
    plain = write_run(tmp_path, Scenario(steps=1))
    assert agents(read(plain)) is None
    assert json.loads((plain / "summary.json").read_text())["agents"] is None


def test_wasted_tokens_are_in_the_ledger_under_their_reason(run: Path) -> None:
    found = Found(read(run))
    rows = {row["label"]: row for row in waste(found)["rows"]}
    finished = len(found.run.completions["reward"])
    assert rows["calls that were cut off"]["tokens"] == 3 * finished
    assert "gave up a call" in rows["calls that were cut off"]["meaning"]
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
    trained = rows["trained on"]["tokens"]
    assert useful(found) == pytest.approx(trained / (trained + 3 * finished))


def test_the_viewer_has_a_conversation(run: Path) -> None:
    found = samples(read(run))
    assert found is not None
    one = found["samples"][0]
    assert [(mark["title"], mark.get("branch")) for mark in one["marks"]] == [
        ("model, turn 1", None),
        ("harness", None),
        ("model, turn 2, 1 tool calls, reward 0.5", None),
        ("harness", f"branch (history edited): goes on from token {len(one['prompt']) - 1}, in the prompt"),
        ("model, turn 3, 2 tool calls, reward 0.5", None),
    ]
    for mark in one["marks"]:
        given = one["pieces"][mark["at"] : mark["at"] + 14] == list("[tool says 42]")
        assert given == (mark["role"] == "harness")
    assert one["episode"]["turns"] == "3"
    assert one["episode"]["tokens of calls cut off"] == "3"


def test_marks_of_a_long_episode_are_where_its_tokens_are(tmp_path: Path) -> None:
    long = samples(read(write_run(tmp_path, Scenario(steps=1, turns=3, median_tokens=1200))))
    assert long is not None
    one = long["samples"][0]
    assert one["cut"] == HEAD
    assert [mark["at"] for mark in one["marks"]] == sorted(mark["at"] for mark in one["marks"])
    assert all(mark["at"] < len(one["pieces"]) for mark in one["marks"])
    assert one["marks"][-1]["title"].startswith("model, turn 3")


def test_a_run_of_episodes_is_sound(run: Path) -> None:
    found = audit(run / "trajectories", "run", {}, json.loads((run / "summary.json").read_text()))
    assert found.violations == []
    assert found.ledger.consumed == SAMPLES
    assert verify(run / "trajectories").sound
    assert all(
        len(trajectory.episode.turns) == 3 for trajectory in read_run(run / "trajectories") if trajectory.episode
    )


@pytest.mark.parametrize(("branches", "sound"), [((Branch(5, 2, "parallel_call"),), True), ((), False)])
def test_versions_go_back_between_parallel_calls_only(
    tmp_path: Path, branches: tuple[Branch, ...], sound: bool
) -> None:
    episode = Episode(branches=branches, turns=(Turn(3, 5), Turn(5, 7)))
    answers = [answer(0, 0, 1.0, [1, 0], episode=episode), answer(0, 1, 0.0, [0])]
    write_log(tmp_path, answers)
    write_journal(tmp_path, [Admitted(0, 0, 1e9, 64)])
    assert audit(tmp_path, RUN_ID, {}).sound == sound


@needs_chromium
def test_the_page_shows_it(browser: object, run: Path) -> None:
    with opened(browser, write_report(run)) as page:
        assert "branched off" in page.locator("#agents").inner_text()
        assert page.locator("#sample-view .turn.model").count() == 3
        assert page.locator("#sample-view .branch").inner_text().startswith("⑂ branch (history edited)")
        assert "time in model, tools, waiting" in page.locator("#sample-view").inner_text()
