"""What a sentinel that stops a run leaves behind, and steps that are left out on purpose."""

from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from asyncrl.config import Run, Sentinel, Trainer
from asyncrl.config.algorithm import AlgorithmBase, Grpo, Importance, Ppo
from asyncrl.errors import DivergenceError
from asyncrl.training.diagnostics import NOTHING_MEASURED
from asyncrl.training.guardrails import Guardrails
from asyncrl.training.learner import Learner
from asyncrl.training.report import StepReport
from tests.support.tiny_model import tiny_checkpoint
from tests.support.training_groups import make_groups

ALGORITHMS: list[AlgorithmBase] = [Grpo(), Ppo(critic_lr=1e-2)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_checkpoint(directory)
    return directory


def _learner(path: Path, algorithm: AlgorithmBase, *skipped: int) -> Learner:
    correction = Importance(weight="token", reject=(), max_drift=1e-3)
    sentinel = Sentinel(skip_steps=skipped)
    return Learner(path, Run(trainer=Trainer(), algorithm=algorithm, correction=correction, sentinel=sentinel))  # type: ignore[arg-type]


def _state(learner: Learner) -> list[Tensor]:
    """Weights and moments of policy and critic."""
    found = [tensor.clone() for _, tensor in learner.tensors()]
    for module, optimizer in [(learner.model, learner.optimizer)] + (
        [] if learner.critic is None else [(learner.critic, learner.critic.optimizer)]
    ):
        found += [parameter.detach().clone() for parameter in module.parameters()]
        found += [value.clone() for state in optimizer.state.values() for value in state.values()]
    return found


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _refuse(report: StepReport) -> StepReport:
    raise DivergenceError(f"step {report.version}")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_refused_step_changes_nothing(model_path: Path, algorithm: AlgorithmBase) -> None:
    """Nor does it change what the next steps do."""
    learner, twin = (_learner(model_path, algorithm) for _ in range(2))
    for each in (learner, twin):
        each.accumulate(make_groups(2))
        each.step()
    before, least = _state(learner), learner.caution.least
    learner.accumulate(make_groups(3, seed=1))
    with pytest.raises(DivergenceError, match="step 2"):
        learner.step(_refuse)
    assert _same(_state(learner), before)
    assert (learner.version, learner.caution.least) == (1, least)
    for each in (learner, twin):
        each.accumulate(make_groups(2, seed=2))
    assert learner.step(lambda report: report) == twin.step()
    assert _same(_state(learner), _state(twin))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step_that_is_left_out_moves_the_version_alone(model_path: Path, algorithm: AlgorithmBase) -> None:
    learner = _learner(model_path, algorithm, 2, 5)
    learner.accumulate(make_groups(2))
    assert not learner.step().skipped
    before, least = _state(learner), learner.caution.least
    learner.accumulate(make_groups(2, seed=1))
    report = learner.step()
    assert (report.skipped, report.fault) == (True, "sentinel.skip_steps names it")
    assert (report.version, report.samples) == (2, 8)
    assert report.figures["measured_tokens"] == 0
    assert not report.alarms
    assert _same(_state(learner), before)
    assert (learner.version, learner.caution.least) == (2, least)
    learner.accumulate(make_groups(2, seed=1))
    assert not learner.step().skipped
    assert not _same(_state(learner), before)


def _report(version: int, *, kl: float = 0.0, skipped: bool = False) -> StepReport:
    return StepReport(
        version=version,
        samples=1,
        tokens=1,
        loss=0.0,
        grad_norm=0.0,
        skipped=skipped,
        fault="of a fault" if skipped else "",
        figures=NOTHING_MEASURED | {"mismatch_kl": kl},
    )


def test_steps_that_are_left_out_are_not_judged() -> None:
    watch = Guardrails(Sentinel(skip_steps=(3, 4), max_skipped=3), "fp32")
    watch.check(_report(1, skipped=True))
    watch.check(_report(2, skipped=True))
    for version in (3, 4):
        assert watch.check(_report(version, kl=9.0, skipped=True)) == _report(version, kl=9.0, skipped=True)
    with pytest.raises(
        DivergenceError, match=r"3 steps in a row were skipped, the last because of a fault; the .* 2\."
    ):
        watch.check(_report(5, skipped=True))


@pytest.mark.parametrize(("precision", "said"), [("fp32", "compare engine and trainer"), ("fp8", "precision=bf16")])
def test_the_advice_names_what_resume_takes(precision: str, said: str) -> None:
    watch = Guardrails(Sentinel(skip_steps=(40,)), precision, "runs/mine")
    with pytest.raises(DivergenceError) as stop:
        watch.check(_report(58, kl=0.7))
    text = str(stop.value)
    assert "`asyncrl resume runs/mine 'sentinel.skip_steps=[40,58]' trainer.lr=...`" in text
    assert "`asyncrl resume runs/mine sentinel.max_kl=...`" in text
    assert said in text
    with pytest.raises(DivergenceError, match=r"model\.path=runs/mine/checkpoints/step-N"):
        Guardrails(msgspec.structs.replace(Sentinel(), max_skipped=1), precision, "runs/mine").check(
            _report(3, skipped=True)
        )
