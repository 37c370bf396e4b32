"""Algorithms inside the learner: whole-step ones, the critic, penalties, and what happens when numbers break."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.config import Run, Sentinel, Trainer
from asyncrl.config.algorithm import CustomAlgorithm, CustomCorrection, Grpo, Importance, Kl, Ppo, ReinforcePp
from asyncrl.errors import ConfigError, DivergenceError
from asyncrl.training import checkpoint
from asyncrl.training.batches import block, pack
from asyncrl.training.checkpoint import TrainingManifest
from asyncrl.training.guardrails import Guardrails, alarms
from asyncrl.training.learner import Learner
from asyncrl.training.report import StepReport
from asyncrl.types import Group, Segment, Slot, Trajectory
from tests.support.tiny_model import tiny_checkpoint

VOCABULARY = 48
PLAIN = Importance(weight="none", reject=())


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_checkpoint(directory)
    return directory


@pytest.fixture(scope="module")
def tied_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tied")
    tiny_checkpoint(directory, "qwen2")
    return directory


@pytest.fixture(params=["tied", "untied"])
def either_path(request: pytest.FixtureRequest, model_path: Path, tied_path: Path) -> Path:
    """A model whose output matrix is its embedding, and one with its own."""
    return tied_path if request.param == "tied" else model_path


def make(model_path: Path, algorithm: object, correction: Importance = PLAIN, *, weight_decay: float = 0.0) -> Learner:
    trainer = Trainer(lr=1e-3, grad_clip=1e9, weight_decay=weight_decay)
    return Learner(model_path, Run(trainer=trainer, algorithm=algorithm, correction=correction))  # type: ignore[arg-type]


def groups(count: int, *, logprob: float = -3.9, seed: int = 0) -> list[Group]:
    rng = np.random.default_rng(seed)
    return [
        Group(
            id=group,
            trajectories=tuple(
                Trajectory(
                    slot=Slot(group, sample),
                    prompt="p",
                    segments=(
                        Segment.given([1, 2, 3]),
                        Segment.sampled(rng.integers(0, VOCABULARY, n := int(rng.integers(2, 9))), [logprob] * n, 0),
                    ),
                    reward=float(rng.integers(0, 3)),
                    finish="stop",
                    started=0.0,
                    finished=1.0,
                    engine="e",
                )
                for sample in range(4)
            ),
        )
        for group in range(count)
    ]


def weights(learner: Learner) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in learner.model.parameters()]


@pytest.mark.parametrize("algorithm", [ReinforcePp(), ReinforcePp(group_baseline=True), Ppo()])
def test_whole_step_algorithms_do_not_depend_on_how_groups_arrive(model_path: Path, algorithm: object) -> None:
    together, apart = make(model_path, algorithm), make(model_path, algorithm)
    together.accumulate(groups(4))
    for group in groups(4):
        apart.accumulate([group])
    assert together.step().loss == pytest.approx(apart.step().loss)
    for one, other in zip(weights(together), weights(apart), strict=True):
        assert torch.equal(one, other)


def step_gradient(learner: Learner, found: list[Group]) -> torch.Tensor:
    """Of a whole step, all weights in one row."""
    seen: list[torch.Tensor] = []

    def read(*_: object) -> None:
        seen.extend(p.grad.flatten().clone() for p in learner.model.parameters() if p.grad is not None)

    learner.optimizer.register_step_pre_hook(read)
    learner.accumulate(found)
    learner.step()
    return torch.cat(seen)


def rewarded_short(count: int) -> list[Group]:
    """Groups in which the short completions are right: most tokens are of wrong ones."""
    return [
        msgspec.structs.replace(
            group,
            trajectories=tuple(
                msgspec.structs.replace(t, reward=float(t.sampled_tokens < 5)) for t in group.trajectories
            ),
        )
        for group in groups(count)
    ]


def test_reinforce_pp_has_the_gradient_of_rewards_whitened_over_tokens(model_path: Path) -> None:
    """As verl's `masked_whiten` over the response mask: each token has its sample's reward, less the mean of all."""
    learner, found = make(model_path, ReinforcePp()), rewarded_short(4)
    (batch,) = pack([block(g, [t.reward for t in g.trajectories]) for g in found], 10_000)
    reward_L = batch.advantage_L
    expected_L = (reward_L - reward_L.mean()) / reward_L.std(correction=0)
    loss = -(expected_L * learner.token_logprobs(batch)).mean()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(learner.model.parameters()))])
    torch.testing.assert_close(step_gradient(learner, found), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("placement", ["loss", "reward"])
@pytest.mark.parametrize("algorithm", [ReinforcePp(), ReinforcePp(group_baseline=True), Ppo(critic_warmup_steps=0)])
def test_a_vanishing_penalty_is_none(model_path: Path, algorithm: ReinforcePp | Ppo, placement: str) -> None:
    none, tiny = (
        step_gradient(make(model_path, msgspec.structs.replace(algorithm, kl=kl)), rewarded_short(4))
        for kl in (Kl(coefficient=c, placement=placement) for c in (0.0, 1e-12))  # type: ignore[arg-type]
    )
    torch.testing.assert_close(none, tiny, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("algorithm", [Grpo(), ReinforcePp()])
def test_a_step_without_any_advantage_sounds_an_alarm(model_path: Path, algorithm: object) -> None:
    learner, found = make(model_path, algorithm), groups(2)
    equal = [
        msgspec.structs.replace(g, trajectories=tuple(msgspec.structs.replace(t, reward=0.1) for t in g.trajectories))
        for g in found
    ]
    learner.accumulate(equal)
    report = learner.step()
    assert report.figures["informative_fraction"] == 0
    assert [text.partition(" ")[0] for text in report.alarms if "informative" in text] == ["informative_fraction=0"]
    learner.accumulate([found[0], *equal[1:]])
    report = learner.step()
    assert 0 < report.figures["informative_fraction"] <= (0.5 if isinstance(algorithm, Grpo) else 1)
    assert not any("informative" in text for text in report.alarms)


def test_an_own_loss_may_learn_without_advantages(model_path: Path) -> None:
    run = Run(trainer=Trainer(lr=1e-3), algorithm=CustomAlgorithm(function=f"{EXAMPLE}:loss"))
    learner = Learner(model_path, run)
    learner.accumulate([msgspec.structs.replace(g, trajectories=g.trajectories[:1]) for g in groups(1)])
    report = learner.step()
    assert "informative_fraction" not in report.figures


def test_the_first_critic_values_are_zero_and_the_critic_learns_the_returns(model_path: Path) -> None:
    learner = make(model_path, Ppo(critic_lr=1e-2, trace=1.0, whiten=False))
    found = groups(3)
    losses: list[float] = []
    for _ in range(30):
        learner.accumulate(found)
        losses.append(learner.step().figures["critic_loss"])
    # With V = 0 and trace 1 every return is the sample's reward: the loss is the token mean of R^2 / 2.
    tokens = [(t.reward, t.sampled_tokens) for group in found for t in group.trajectories]
    assert losses[0] == pytest.approx(sum(r * r / 2 * n for r, n in tokens) / sum(n for _, n in tokens), rel=1e-5)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_critic_can_be_trained_alone_first(model_path: Path, tmp_path: Path, weight_decay: float) -> None:
    """The policy does not move at all meanwhile, and its first own step is that of a fresh optimizer."""
    learner = make(model_path, Ppo(critic_warmup_steps=1, critic_lr=1e-2), weight_decay=weight_decay)
    before = weights(learner)
    learner.accumulate(groups(2))
    report = learner.step()
    assert report.figures["critic_grad_norm"] > 0
    assert not learner.optimizer.state
    assert not any("informative" in text for text in report.alarms)
    manifest = TrainingManifest(step=1, samples_trained=8, consumed=((0, 1),))
    saved = checkpoint.save(learner, tmp_path, manifest, model_path=model_path, keep=1)
    checkpoint.restore(learner, saved)
    assert all(torch.equal(one, other) for one, other in zip(before, weights(learner), strict=True))
    learner.accumulate(groups(2))
    learner.step()
    assert not all(torch.equal(one, other) for one, other in zip(before, weights(learner), strict=True))


def trained_critic(path: Path, folder: Path, steps: int = 2) -> tuple[Learner, Path]:
    """A learner after some steps, and its checkpoint."""
    learner = make(path, Ppo(critic_lr=1e-2))
    for seed in range(steps):
        learner.accumulate(groups(2, seed=seed))
        learner.step()
    manifest = TrainingManifest(step=steps, samples_trained=8 * steps, consumed=((0, 2 * steps - 1),))
    return learner, checkpoint.save(learner, folder, manifest, model_path=path, keep=1)


def critic_weights(learner: Learner) -> dict[str, torch.Tensor]:
    assert learner.critic is not None
    return {name: parameter.detach().clone() for name, parameter in learner.critic.named_parameters()}


def test_ppo_resumes_exactly_with_its_critic(either_path: Path, tmp_path: Path) -> None:
    whole, saved = trained_critic(either_path, tmp_path)
    second = make(either_path, Ppo(critic_lr=1e-2))
    checkpoint.restore(second, saved)
    for learner in (whole, second):
        learner.accumulate(groups(2, seed=7))
    assert whole.step() == second.step()
    assert all(torch.equal(one, other) for one, other in zip(weights(whole), weights(second), strict=True))
    mine, theirs = critic_weights(whole), critic_weights(second)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_every_weight_of_the_critic_is_trained_and_it_has_no_output_matrix(either_path: Path, tmp_path: Path) -> None:
    before = critic_weights(make(either_path, Ppo()))
    learner, saved = trained_critic(either_path, tmp_path)
    after, written = critic_weights(learner), load_file(saved / checkpoint.CRITIC)
    assert learner.critic is not None
    assert all(parameter.grad is None for parameter in learner.critic.parameters())
    assert "body.embed_tokens.weight" in after
    assert not any("lm_head" in name for name in [*after, *written])
    for name, weight in after.items():
        assert not torch.equal(weight, before[name]), name
        assert f"{name}/exp_avg" in written, name


def test_critics_of_older_checkpoints_are_read(either_path: Path, tmp_path: Path) -> None:
    """They have an output matrix that is its own, and no moments of an embedding that is tied."""
    learner, saved = trained_critic(either_path, tmp_path)
    written = load_file(saved / checkpoint.CRITIC)
    if make(either_path, Grpo()).model_config.tied_embeddings:
        written = {name: t for name, t in written.items() if not name.startswith("body.embed_tokens.weight/")}
    else:
        written["body.lm_head.weight"] = torch.ones_like(written["body.embed_tokens.weight"])
    save_file(written, saved / checkpoint.CRITIC)
    resumed = make(either_path, Ppo(critic_lr=1e-2))
    checkpoint.restore(resumed, saved)
    expected, found = critic_weights(learner), critic_weights(resumed)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    resumed.accumulate(groups(2, seed=7))
    assert not resumed.step().skipped


@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_a_penalty_keeps_the_policy_near_the_reference(model_path: Path, placement: str) -> None:
    gaps: dict[float, float] = {}
    for coefficient in (0.0, 5.0):
        algorithm = ReinforcePp(kl=Kl(coefficient=coefficient, placement=placement))  # type: ignore[arg-type]
        learner, start = make(model_path, algorithm), make(model_path, Grpo())
        learner.caution.least = 0.0
        (batch,) = pack([block(group, [0.0] * 4) for group in groups(3)], 10_000)
        for _ in range(15):
            learner.accumulate(groups(3))
            learner.step()
        with torch.no_grad():
            gap = learner.token_logprobs(batch) - start.token_logprobs(batch)
        gaps[coefficient] = float(gap.square().mean())
    assert gaps[5.0] < 0.5 * gaps[0.0]


def test_the_penalty_is_zero_at_the_reference(model_path: Path) -> None:
    learner = make(model_path, Grpo(kl=Kl(coefficient=0.1)))
    learner.accumulate(groups(2))
    assert learner.step().figures["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    learner.accumulate(groups(2))
    assert learner.step().figures["reference_kl"] > 1e-6


def test_entropy_is_that_of_the_model_and_its_bonus_raises_it(model_path: Path) -> None:
    learner = make(model_path, Grpo(entropy=10.0))
    found: list[float] = []
    for _ in range(10):
        learner.accumulate(groups(2))
        found.append(learner.step().figures["entropy"])
    assert 0 < found[0] < np.log(VOCABULARY) + 1e-6
    assert found[-1] > found[0]


def test_a_loss_that_is_not_finite_skips_the_step_and_names_the_samples(model_path: Path) -> None:
    learner = make(model_path, Grpo(), Importance(reject=()))
    before = weights(learner)
    bad = groups(1, logprob=float("nan"), seed=1)[0]
    renamed = tuple(Trajectory(**_fields(t) | {"slot": Slot(7, t.slot.sample)}) for t in bad.trajectories)
    learner.accumulate([*groups(1), Group(id=7, trajectories=renamed)])
    report = learner.step()
    assert report.skipped
    assert "7/0" in report.fault
    assert "0/0" not in report.fault
    assert all(torch.equal(one, other) for one, other in zip(before, weights(learner), strict=True))
    learner.accumulate(groups(2))
    assert not learner.step().skipped, "the fault must not outlive its step"


def _fields(trajectory: Trajectory) -> dict[str, object]:
    return {name: getattr(trajectory, name) for name in trajectory.__struct_fields__}


def report(*, skipped: bool = False, kl: float = 0.0) -> StepReport:
    figures = {"mismatch_kl": kl, "ess": 0.5}
    return StepReport(
        version=9, samples=1, tokens=1, loss=0.0, grad_norm=0.0, skipped=skipped, fault="f", figures=figures
    )


def test_the_watch_stops_after_skips_in_a_row_only() -> None:
    watch = Guardrails(Sentinel(max_skipped=2), "fp32")
    for skipped in (True, False, True, False):
        watch.check(report(skipped=skipped))
    watch.check(report(skipped=True))
    with pytest.raises(DivergenceError, match=r"2 steps in a row were skipped.*version 7"):
        watch.check(report(skipped=True))


@pytest.mark.parametrize("kl", [0.6, -0.6])
def test_the_watch_stops_at_the_kl_bound(kl: float) -> None:
    Guardrails(Sentinel(max_kl=0), "fp32").check(report(kl=kl))
    with pytest.raises(DivergenceError, match=r"mismatch_kl=-?0\.6 is past sentinel\.max_kl=0\.5"):
        Guardrails(Sentinel(), "fp32").check(report(kl=kl))


def test_alarms_sound_at_the_documented_levels() -> None:
    quiet = {
        "rho_mean": 1.0,
        "rho_std": 0.5,
        "ess": 0.9,
        "mismatch_kl": 0.01,
        "chi2_token": 0.1,
        "rejected_samples": 0.1,
        "informative_fraction": 0.1,
    }
    assert alarms(quiet) == ()
    assert alarms({name: value for name, value in quiet.items() if name != "informative_fraction"}) == ()
    beyond = {
        "rho_mean": 2.1,
        "rho_std": 1.1,
        "ess": 0.29,
        "mismatch_kl": -0.11,
        "chi2_token": 1.1,
        "rejected_samples": 0.6,
        "informative_fraction": 0.0,
    }
    for name, value in beyond.items():
        (text,) = alarms(quiet | {name: value})
        assert text.startswith(f"{name}={value:.3g} is ")


EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loss.py"


def test_the_example_of_an_own_loss_and_correction_trains(model_path: Path) -> None:
    run = Run(
        trainer=Trainer(lr=1e-3),
        algorithm=CustomAlgorithm(function=f"{EXAMPLE}:loss"),
        correction=CustomCorrection(function=f"{EXAMPLE}:weights"),
    )
    learner, plain = Learner(model_path, run), make(model_path, Grpo())
    (batch,) = pack([block(group, [0.0] * 4) for group in groups(3)], 10_000)
    with torch.no_grad():
        rho = (plain.token_logprobs(batch) - batch.behaviour_logp_L).exp()
    learner.accumulate(groups(3))
    found = learner.step()
    assert found.figures["rho_mean"] == pytest.approx(float(rho.mean()), rel=1e-3)
    assert found.grad_norm > 0


@pytest.mark.parametrize("function", ["no_such_module:loss", f"{EXAMPLE}:nothing", "no/such/file.py:loss"])
def test_a_function_that_cannot_be_loaded_is_refused(model_path: Path, function: str) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.function=.*cannot be used"):
        make(model_path, CustomAlgorithm(function=function))
