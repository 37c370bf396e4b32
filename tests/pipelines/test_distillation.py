"""Whole runs with teachers: the student comes closer, one that fails costs its samples, and a kill loses nothing."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.buffer.reader import read_run
from asyncrl.config import WarmStart
from asyncrl.config.distillation import Distillation
from asyncrl.config.task import ChainsTask
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.observe.query.tables import open_run
from asyncrl.system.run_directory import RunDirectory
from asyncrl.training.warm_start import make_model
from pipelines.cli.check import check
from pipelines.recording import earlier_settings
from tests.pipelines.test_agents import kill_actor
from tests.pipelines.test_replay import replay
from tests.support import quickstart_runs
from tests.support.command import asyncrl
from tests.support.quickstart_runs import finish, kill_after_step, resume, start, summary
from tests.support.tiny_model import tiny_checkpoint

SMALL = ("evaluation.prompts=4", "rollout.max_tokens=24", "trainer.lr=1e-3")
ADAPTERS = ("trainer.lora.rank=16", "trainer.lr=1e-2")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another seed, and trained for longer than the student."""
    return make_model(WarmStart(steps=120), ChainsTask(), 1, tmp_path_factory.mktemp("teacher"))


def _taught_by(*paths: Path) -> str:
    return f"teachers=[{','.join(f'{{path:{path},weight:{n}}}' for n, path in enumerate(paths, 1))}]"


def test_the_student_comes_closer_to_its_teacher(tmp_path: Path, model: Path, teacher: Path) -> None:
    """With groups of one, and with a reward that is always 0: the teacher is all that there is."""
    settings = "steps=20", "flow.groups_per_step=48", "flow.groups_per_take=16", "rollout.group_size=1"
    quickstart_runs.run(
        tmp_path, model, *SMALL, *settings, "trainer.warmup_steps=4", "max_staleness=0", _taught_by(teacher)
    )
    run = tmp_path / "run"
    with open_run(run) as tables:
        kl = [row[0] for row in tables.execute("SELECT teacher_kl FROM metrics ORDER BY step").fetchall()]
        samples, tokens, seconds = tables.execute(
            "SELECT max(teacher_samples), max(teacher_tokens), max(teacher_busy_seconds) FROM metrics"
        ).fetchall()[0]
        # No step is stale here, so what was recorded is what was learned from.
        of_first = tables.execute(
            "SELECT sum(teacher_kl * answer_tokens) / sum(answer_tokens) FROM trajectories WHERE step = 0"
        ).fetchall()[0][0]
        assert tables.execute(
            "SELECT count(*) FROM trajectories WHERE len(teacher_logprobs) <> answer_tokens"
        ).fetchone() == (0,)
    assert of_first == pytest.approx(kl[0], abs=1e-4)
    assert sum(kl[-4:]) / 4 < 0.9 * kl[0]
    recorded = list(read_run(run / "trajectories"))
    assert (samples, tokens) == (len(recorded), sum(each.sampled_tokens for each in recorded))
    assert seconds > 0
    assert summary(tmp_path)["teacher_kl_last"] == kl[-1]
    done = replay(run)
    assert done.out.splitlines()[-1].startswith("identical: 20 steps again"), done.err
    assert not replay(run, "distill.coefficient=0.5").out.splitlines()[-1].startswith("identical")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lora", [(), pytest.param(ADAPTERS, marks=pytest.mark.nightly)], ids=["whole", "adapters"])
def test_over_the_likeliest_tokens_it_comes_closer(
    tmp_path: Path, model: Path, teacher: Path, lora: tuple[str, ...]
) -> None:
    settings = "steps=8", "flow.groups_per_step=48", "flow.groups_per_take=16", "max_staleness=1", "pipeline=distill"
    rest = "trainer.warmup_steps=4", "distill.top_k=8", f"teachers=[{{path:{teacher}}}]"
    quickstart_runs.run(tmp_path, model, *SMALL, *settings, *rest, *lora)
    run = tmp_path / "run"
    with open_run(run) as tables:
        figures = "SELECT teacher_divergence, teacher_kl, informative_fraction FROM metrics ORDER BY step"
        apart, kl, informative = zip(*tables.execute(figures).fetchall(), strict=True)
        assert tables.execute(
            "SELECT count(*) FROM trajectories WHERE teacher_top_k_bytes IS DISTINCT FROM answer_tokens * 68"
        ).fetchone() == (0,), "8 ids and 9 log-probabilities for each sampled token"
    assert min(apart) > 0
    assert set(informative) == {1.0}
    assert sum(apart[-4:]) / 4 < 0.8 * apart[0]
    assert sum(kl[-4:]) / 4 < 0.9 * kl[0]
    assert all(each.teacher_top_k.shape == (each.sampled_tokens, 17) for each in read_run(run / "trajectories"))
    assert check(run).sound
    done = replay(run)
    assert done.out.splitlines()[-1].startswith("identical: 8 steps again"), done.err
    without = replay(run, "distill.top_k=0")
    assert without.code == 0, without.err
    assert not without.out.splitlines()[-1].startswith("identical")


def _unsure(student: Path, directory: Path, tensor: str, rows: slice) -> Path:
    """A random teacher with the student's tokenizer, of which a part was lost."""
    tokenizer = load_tokenizer(student)
    tiny_checkpoint(directory, vocab_size=tokenizer.size, tie_word_embeddings=False)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(student / name, directory / name)
    tensors = load_file(directory / "model.safetensors")
    tensors[tensor][rows] = torch.nan
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_a_teacher_that_fails_on_some_samples_costs_these(tmp_path: Path, model: Path, teacher: Path) -> None:
    """Two teachers, of which one knows no d. What it cannot judge is dropped, and told once."""
    (d,) = load_tokenizer(model).encode("d")
    broken = _unsure(model, tmp_path / "broken", "model.embed_tokens.weight", slice(d, d + 1))
    said = quickstart_runs.run(
        tmp_path, model, *SMALL, "rollout.group_size=2", "distill.reward=0.5", _taught_by(teacher, broken)
    )
    result = summary(tmp_path)
    assert (result["status"], result["steps"]) == ("ok", 4)
    assert result["ledger"]["dropped"]["teacher_error"] > 0
    assert said.count("log-probabilities are not finite") == 1
    assert check(tmp_path / "run").sound
    for each in read_run(tmp_path / "run" / "trajectories"):
        assert len(each.teacher_logprobs) == each.sampled_tokens
        assert d not in each.tokens[:-1]
    found = asyncrl("query", tmp_path / "run", "failures")
    assert found.code == 0
    assert "teacher_error" in found.out


def test_a_teacher_that_always_fails_ends_the_run(tmp_path: Path, model: Path) -> None:
    broken = _unsure(model, tmp_path / "broken", "model.norm.weight", slice(None))
    done = asyncrl(*quickstart_runs.command(tmp_path, model, *SMALL, _taught_by(broken))[1:])
    assert done.code == 12
    assert f"teacher {broken} has failed on every sample so far" in done.err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_resumed_run_weighs_teachers_and_rewards_anew(tmp_path: Path, model: Path, teacher: Path) -> None:
    """The steps before the checkpoint keep their settings, those after it have the new ones, also in a replay."""
    quickstart_runs.run(tmp_path, model, *SMALL, "max_staleness=0", _taught_by(teacher))
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoints" / "step-4")
    shutil.rmtree(run / "checkpoints" / "step-3")
    refused = asyncrl("resume", run, "distill.coefficient=0")
    assert refused.code == 2, refused.out + refused.err
    assert "distill.coefficient" in refused.err
    assert not (run / "earlier_settings").exists()
    done = asyncrl("resume", run, "distill.coefficient=0.25", "distill.reward=0.5")
    assert done.code == 0, done.out + done.err
    settings = [(first, each.distill) for first, each in earlier_settings.by_step(RunDirectory(run))]
    assert settings == [(0, Distillation()), (2, Distillation(coefficient=0.25, reward=0.5))]
    replayed = replay(run)
    assert replayed.out.splitlines()[-1].startswith("identical: 4 steps again"), replayed.err
    assert not replay(run, "distill.coefficient=1", "distill.reward=0").out.splitlines()[-1].startswith("identical")
    assert check(run).sound


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cluster", ["inprocess", "local"])
def test_killed_and_resumed(tmp_path: Path, model: Path, teacher: Path, cluster: str) -> None:
    """Recorded samples are not judged again, and the same steps give the same weights."""
    process = start(tmp_path, model, *SMALL, f"cluster={cluster}", "max_staleness=2", "steps=5", _taught_by(teacher))
    kill_after_step(process, tmp_path, 2)
    before = {each.slot: each.teacher_logprob_bytes for each in read_run(tmp_path / "run" / "trajectories")}
    resume(tmp_path / "run")
    after = {each.slot: each.teacher_logprob_bytes for each in read_run(tmp_path / "run" / "trajectories")}
    assert all(after[slot] == said for slot, said in before.items())
    assert check(tmp_path / "run").sound
    done = replay(tmp_path / "run")
    assert done.out.splitlines()[-1].startswith("identical: 5 steps again"), done.err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_teacher_is_killed(tmp_path: Path, model: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started again by itself, and asked again what it had not answered."""
    monkeypatch.setenv("ASYNCRL_TEST", str(tmp_path))
    process = start(tmp_path, model, *SMALL, "cluster=local", "steps=8", _taught_by(teacher))
    try:
        kill_actor("TeacherActor", tmp_path)
        output = finish(process, timeout=500)
    finally:
        process.kill()
    result = summary(tmp_path)
    assert (result["status"], result["steps"], result["ledger"]["dropped"]) == ("ok", 8, {}), output
