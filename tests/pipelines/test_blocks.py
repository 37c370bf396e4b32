"""Pipelines of a user's own, from the blocks that ours are made of."""

import json
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError, UserCodeError
from asyncrl.training.checkpoint import numbered
from pipelines.compose import compose
from tests.support import quickstart_runs
from tests.support.command import asyncrl

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_pipeline.py"
CLASS = "UntilGoodEnough"
MISTAKEN = """

class Mistaken(UntilGoodEnough):
    async def run(self):
        blocks = self.blocks
        async with blocks.running(blocks.generate()):
            for step in blocks.steps:
                await blocks.acumulate(step)
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The example, which looks after two steps whether the model is good enough, and finds that it is."""
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 60
    path = tmp_path / "mine.py"
    path.write_text(text.replace("ENOUGH = 0.6", "ENOUGH = 0.0").replace("LOOK_EVERY = 5", "LOOK_EVERY = 2") + MISTAKEN)
    return path


def test_the_last_step_of_a_pipeline_that_ends_early_is_served_saved_and_evaluated(
    own: Path, tmp_path: Path, model: Path
) -> None:
    quickstart_runs.run(tmp_path, model, f"pipeline={own}:{CLASS}", "steps=9", "checkpoint.every=0")
    summary = quickstart_runs.summary(tmp_path)
    assert (summary["status"], summary["steps"]) == ("ok", 2)
    assert [step for step, _ in numbered(tmp_path / "run" / "checkpoints")] == [2]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "evaluation"] == [0, 2]
    assert max(event["version"] for event in events if event["kind"] == "publish") == 2
    ledger = summary["ledger"]
    assert ledger["leased"] == sum(
        (ledger["in_flight"], ledger["buffered"], ledger["consumed"], *ledger["dropped"].values())
    )


def test_it_is_killed_resumed_checked_and_replayed_like_ours(own: Path, tmp_path: Path, model: Path) -> None:
    """Its class stands in the recorded settings, under a path that holds from anywhere."""
    killed = quickstart_runs.start(tmp_path, model, f"pipeline={own}:{CLASS}", "steps=9")
    quickstart_runs.kill_after_step(killed, tmp_path, 1)
    quickstart_runs.resume(tmp_path / "run")
    assert quickstart_runs.summary(tmp_path)["steps"] == 2
    assert asyncrl("check", str(tmp_path / "run")).code == 0
    replayed = asyncrl("replay", str(tmp_path / "run"), "--out", str(tmp_path / "replay"))
    assert replayed.code == 0, replayed.out + replayed.err
    assert "identical" in replayed.out


def test_a_mistake_in_it_is_told_with_its_line(own: Path, tmp_path: Path, model: Path) -> None:
    done = asyncrl(*quickstart_runs.command(tmp_path, model, f"pipeline={own}:Mistaken")[1:])
    assert done.code == UserCodeError.exit_code
    assert f"pipeline={own}:Mistaken: AttributeError" in done.err
    line = own.read_text().splitlines().index("                await blocks.acumulate(step)") + 1
    assert f"({own}:{line})" in done.err
    assert "await blocks.acumulate(step)" in done.err


def test_a_pipeline_that_does_not_exist(own: Path, tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"pipeline=async_gpro does not exist: did you mean async_grpo\?"):
        compose(["pipeline=async_gpro"])
    done = asyncrl(*quickstart_runs.command(tmp_path, model, f"pipeline={own}:Nothing")[1:])
    assert done.code == ConfigError.exit_code
    assert f"pipeline={own}:Nothing cannot be used" in done.err


def test_supervised_starts_are_resumed_and_replayed_as_runs_are(tmp_path: Path, model: Path) -> None:
    """Killed after a step, a run ends with the weights of one that was not: the order of examples needs no history. A
    step is one take: in several, their sums are rounded by how many examples happened to be there for each."""
    rows = [{"prompt": f"a{n}b+1=", "completion": f"b{n + 1}"} for n in range(24)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (
        "pipeline=sft",
        f"sft.path={tmp_path}/sums.jsonl",
        "rollout.group_size=1",
        "steps=6",
        "flow.groups_per_take=4",
    )
    quickstart_runs.run(tmp_path / "whole", model, *settings, "evaluation.every=3")
    killed = quickstart_runs.start(tmp_path / "killed", model, *settings)
    quickstart_runs.kill_after_step(killed, tmp_path / "killed", 2)
    quickstart_runs.resume(tmp_path / "killed" / "run")
    whole, resumed = (tmp_path / name / "run" / "checkpoints" / "step-6" for name in ("whole", "killed"))
    assert (whole / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()
    assert asyncrl("check", str(tmp_path / "killed" / "run")).code == 0
    replayed = asyncrl("replay", str(tmp_path / "whole" / "run"), "--out", str(tmp_path / "replay"))
    assert "identical" in replayed.out
    events = [json.loads(line) for line in (tmp_path / "whole" / "run" / "events.jsonl").read_text().splitlines()]
    losses = {event["step"]: event["loss"] for event in events if event["kind"] == "held_out_loss"}
    assert list(losses) == [0, 3, 6]
    assert losses[6] < losses[0]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["pipeline=sft"], "pipeline=sft has no examples: set sft.path"),
        (["sft.path=chats.jsonl"], "set pipeline=sft"),
        (["pipeline=sft", "sft.path=chats.jsonl", "rollout.replicas=1"], "set 0, since nothing is generated"),
        (["rollout.replicas=0"], "set 1 or more, or nobody generates"),
        (["pipeline=distill"], "pipeline=distill has no teacher"),
    ],
)
def test_settings_that_do_not_suit_a_pipeline(settings: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        compose(settings)
