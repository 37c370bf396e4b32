"""The same step through TRL's trainers and through our learner: the loss, and the gradient of every parameter, agree.

TRL scores recorded answers with its own code (masks, advantages, importance ratios, loss); only generation is replaced.
Both sides hold the same weights, one update away from the reference. Answers have given tokens in between, as a tool's,
and behaviour log-probabilities with enough noise that clips, caps and bounds act on some tokens and not on others.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.rewards import get_soft_overlong_punishment

from asyncrl.algorithms import registry
from asyncrl.algorithms.advantages import group_relative, leave_one_out, overlong_penalty
from asyncrl.config import Rollout, Run, Trainer
from asyncrl.config.algorithm import (
    Algorithm,
    Cispo,
    Correction,
    Dapo,
    DrGrpo,
    Grpo,
    Gspo,
    Importance,
    Kl,
    Overlong,
    Rloo,
)
from asyncrl.training.batches import block, pack
from asyncrl.training.learner import Learner
from asyncrl.training.report import StepReport
from asyncrl.types import GIVEN, Group, Segment, Slot, Trajectory
from tests.support.tiny_model import tiny_checkpoint

VOCABULARY, GROUPS, GROUP_SIZE, MAX_TOKENS = 48, 3, 4, 32
TOLERANCE = 1e-5
BYPASS = Importance(proximal="behaviour", weight="none", reject=())
Gradients = dict[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def _no_notice() -> Any:
    """TRL warns that answers of one's own are an experimental feature."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        yield


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_checkpoint(directory)
    return directory


def _trajectory(slot: Slot, segments: list[Segment], reward: float) -> Trajectory:
    return Trajectory(
        slot=slot,
        prompt="p",
        segments=tuple(segments),
        reward=reward,
        finish="stop",
        started=0.0,
        finished=1.0,
        engine="e",
    )


def _groups(rng: np.random.Generator) -> list[Group]:
    groups: list[Group] = []
    for group in range(GROUPS):
        prompt = Segment.given(rng.integers(2, VOCABULARY, rng.integers(3, 9)))
        samples: list[Trajectory] = []
        for sample in range(GROUP_SIZE):
            first, tool, second = (rng.integers(2, VOCABULARY, rng.integers(1, 12)) for _ in range(3))
            parts = [prompt, Segment.sampled(first, np.full(len(first), -3.0), 0)]
            if sample % 2:
                parts += [Segment.given(tool), Segment.sampled(second, np.full(len(second), -3.0), 0)]
            samples.append(_trajectory(Slot(group, sample), parts, float(rng.normal())))
        groups.append(Group(id=group, trajectories=tuple(samples)))
    return groups


def _noisy(learner: Learner, groups: list[Group], rng: np.random.Generator, noise: float) -> list[Group]:
    """The groups with behaviour log-probabilities around those of the learner's weights."""
    found: list[Group] = []
    for group in groups:
        samples: list[Trajectory] = []
        for trajectory in group.trajectories:
            (batch,) = pack([block(Group(id=0, trajectories=(trajectory,)), [0.0])], 10_000)
            logp = learner.token_logprobs(batch).detach().numpy()
            mu = iter(np.split(logp + rng.normal(0, noise, len(logp)), _sampled_ends(trajectory)))
            parts = [s if s.version == GIVEN else Segment.sampled(s.tokens, next(mu), 0) for s in trajectory.segments]
            samples.append(_trajectory(trajectory.slot, parts, trajectory.reward))
        found.append(Group(id=group.id, trajectories=tuple(samples)))
    return found


def _sampled_ends(trajectory: Trajectory) -> list[int]:
    return np.cumsum([len(s) for s in trajectory.segments if s.version != GIVEN])[:-1].tolist()


def _prepared(
    model_path: Path, algorithm: Algorithm, correction: Correction, *, seed: int = 0, noise: float = 0.25
) -> tuple[Learner, PreTrainedModel, list[Group]]:
    """A learner one update away from where it started, a transformers model of the same weights, and fresh groups."""
    rng = np.random.default_rng(seed)
    settings = Trainer(lr=1e-2, grad_clip=1e9, device="cpu")
    rollout = Rollout(max_tokens=MAX_TOKENS, group_size=GROUP_SIZE)
    learner = Learner(model_path, Run(trainer=settings, rollout=rollout, algorithm=algorithm, correction=correction))
    learner.accumulate(_groups(rng))
    assert not learner.step().skipped
    model = AutoModelForCausalLM.from_pretrained(model_path)
    model.load_state_dict(dict(learner.tensors()))
    return learner, model, _noisy(learner, _groups(rng), rng, noise)


def _ours(learner: Learner, groups: list[Group]) -> tuple[StepReport, Gradients]:
    """A step, and its gradients under Hugging Face names."""
    gradients: Gradients = {}

    def read(*_: object) -> None:
        """The names are views into the weights: show the gradient through them."""
        for parameter in learner.model.parameters():
            assert parameter.grad is not None
            parameter.data.copy_(parameter.grad)
        gradients.update({name: tensor.clone() for name, tensor in learner.tensors()})

    learner.optimizer.register_step_pre_hook(read)
    learner.accumulate(groups)
    return learner.step(), gradients


def _tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")


def _recorded(groups: list[Group]) -> dict[str, list[Any]]:
    samples = [t for group in groups for t in group.trajectories]
    starts = [len(t.segments[0]) for t in samples]
    return {
        "prompt_ids": [t.segments[0].tokens.tolist() for t in samples],
        "completion_ids": [t.tokens[n:].tolist() for t, n in zip(samples, starts, strict=True)],
        "logprobs": [t.logprobs[n:].tolist() for t, n in zip(samples, starts, strict=True)],
        "env_mask": [(t.versions[n:] != GIVEN).astype(int).tolist() for t, n in zip(samples, starts, strict=True)],
    }


def _arguments(directory: Path) -> dict[str, Any]:
    return {
        "output_dir": str(directory / "trl"),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "gradient_checkpointing": False,
        "per_device_train_batch_size": GROUPS * GROUP_SIZE,
        "num_generations": GROUP_SIZE,
        "max_completion_length": MAX_TOKENS,
    }


def _rows(groups: list[Group]) -> list[dict[str, Any]]:
    return [{"prompt": f"p{t.slot.group}", "score": t.reward} for group in groups for t in group.trajectories]


def _score(completions: list[str], score: list[float], **_: object) -> list[float]:
    return score


def _grpo_trainer(model: PreTrainedModel, model_path: Path, groups: list[Group], **settings: Any) -> GRPOTrainer:
    trainer = GRPOTrainer(
        model,
        _score,
        args=GRPOConfig(**_arguments(model_path) | settings),
        train_dataset=Dataset.from_list(_rows(groups)),
        processing_class=_tokenizer(),
        rollout_func=lambda prompts, trainer: _recorded(groups),
    )
    trainer.current_gradient_accumulation_steps = 1
    model.train()
    return trainer


def _theirs(trainer: GRPOTrainer, inputs: dict[str, Any]) -> tuple[float, Gradients]:
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}


def _our_advantages(algorithm: Algorithm, groups: list[Group]) -> torch.Tensor:
    rewards = [np.array([t.reward for t in group.trajectories]) for group in groups]
    return torch.from_numpy(np.concatenate(registry.entry(algorithm).advantages(algorithm, rewards))).float()


def _assert_equal_gradients(ours: Gradients, theirs: Gradients) -> None:
    assert ours.keys() == theirs.keys()
    assert max(float(tensor.abs().max()) for tensor in theirs.values()) > 1e-2  # both being 0 would prove nothing
    for name, expected in theirs.items():
        assert float((ours[name] - expected).abs().max()) <= TOLERANCE, name


TOKEN_MEAN = {"loss_type": "bnpo", "epsilon": 0.2, "epsilon_high": 0.28}
LOSSES: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    "grpo": (Grpo(aggregation="sequence"), {"loss_type": "grpo", "epsilon": 0.2, "epsilon_high": 0.28}),
    "token mean": (Grpo(), TOKEN_MEAN),
    "dr_grpo": (DrGrpo(), {"loss_type": "dr_grpo", "epsilon": 0.2}),
    "dapo": (Dapo(overlong=Overlong()), {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}),
    "gspo": (
        Gspo(clip_low=0.03, clip_high=0.04),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.03, "epsilon_high": 0.04},
    ),
    "cispo": (Cispo(cap=1.2), {"loss_type": "cispo", "epsilon_high": 1.2}),
    "kl": (
        Grpo(kl=Kl(coefficient=0.1)),
        TOKEN_MEAN | {"beta": 0.1, "use_bias_correction_kl": False},  # which would multiply the penalty by the ratio
    ),
    "entropy": (Grpo(entropy=0.1), TOKEN_MEAN | {"entropy_coef": 0.1}),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_those_of_trl(model_path: Path, name: str, seed: int):
    algorithm, settings = LOSSES[name]
    learner, model, groups = _prepared(model_path, algorithm, BYPASS, seed=seed)
    trainer = _grpo_trainer(model, model_path, groups, **settings)
    trainer.use_vllm, trainer._last_loaded_step = True, 0  # so that it keeps the recorded log-probabilities
    inputs = trainer._generate_and_score_completions(_rows(groups))
    trainer.use_vllm = False
    inputs |= {
        "old_per_token_logps": inputs["sampling_per_token_logps"],
        "advantages": _our_advantages(algorithm, groups),
    }
    loss, gradients = _theirs(trainer, inputs)
    report, our_gradients = _ours(learner, groups)
    assert 0 < report.figures["clip_fraction"] < 0.9
    assert report.loss == pytest.approx(loss, abs=TOLERANCE)
    _assert_equal_gradients(our_gradients, gradients)


WEIGHTS: dict[str, tuple[Importance, dict[str, Any]]] = {
    "token_truncate": (Importance(proximal="trainer", cap=1.2, reject=()), {"vllm_importance_sampling_clip_max": 1.2}),
    "token_mask": (
        Importance(proximal="trainer", floor=0.8, cap=1.3, outside="mask", reject=()),
        {"vllm_importance_sampling_clip_min": 0.8, "vllm_importance_sampling_clip_max": 1.3},
    ),
    "sequence_truncate": (
        Importance(proximal="trainer", weight="sequence", floor=0.7, cap=1.5, reject=()),
        {"vllm_importance_sampling_clip_min": 0.7, "vllm_importance_sampling_clip_max": 1.5},
    ),
    "sequence_mask": (
        Importance(proximal="trainer", weight="sequence", cap=1.5, outside="mask", reject=()),
        {"vllm_importance_sampling_clip_max": 1.5},
    ),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("mode", WEIGHTS)
def test_importance_weights_are_those_of_trl(model_path: Path, mode: str, seed: int):
    """Dr.GRPO without anything handed over: TRL's own advantages, ratios, truncation and loss."""
    correction, settings = WEIGHTS[mode]
    learner, model, groups = _prepared(model_path, DrGrpo(), correction, seed=seed)
    settings = settings | {"vllm_importance_sampling_mode": mode, "loss_type": "dr_grpo", "scale_rewards": "none"}
    trainer = _grpo_trainer(model, model_path, groups, **settings)
    trainer.use_vllm, trainer._last_loaded_step = True, 0  # recorded answers, as if vLLM had made them
    inputs = trainer._generate_and_score_completions(_rows(groups))
    loss, gradients = _theirs(trainer, inputs)
    report, our_gradients = _ours(learner, groups)
    assert 0 < report.figures["truncated_fraction"] < 0.9
    assert report.loss == pytest.approx(loss, abs=TOLERANCE)
    _assert_equal_gradients(our_gradients, gradients)


def test_advantages_are_those_of_trl_up_to_its_standard_deviation(model_path: Path):
    """TRL divides by the unbiased standard deviation plus 1e-4, we by that of the group itself plus 1e-6."""
    _, model, groups = _prepared(model_path, Grpo(), BYPASS)
    trainer = _grpo_trainer(model, model_path, groups, scale_rewards="group")
    theirs = trainer._generate_and_score_completions(_rows(groups))["advantages"].view(GROUPS, GROUP_SIZE).double()
    rewards = np.array([[t.reward for t in group.trajectories] for group in groups])
    for reward_G, advantage_G in zip(rewards, theirs.numpy(), strict=True):
        ours = group_relative(reward_G, normalize_std=True) * (reward_G.std() + 1e-6)
        assert ours == pytest.approx(advantage_G * (reward_G.std(ddof=1) + 1e-4), abs=TOLERANCE)


class _RecordedRloo(RLOOTrainer):
    """TRL's RLOO takes no answers from outside: hand them over in place of generating."""

    recorded: list[Group]

    def _generate_single_turn(self, prompt_ids: Any, *_: Any) -> Any:
        return _recorded(self.recorded)["completion_ids"]

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        return _recorded(self.recorded)["prompt_ids"], None, {}


def test_rloo_is_that_of_trl(model_path: Path):
    """Its ratio is of the whole answer and ours of each token: on-policy the two have the same gradient."""
    learner, model, groups = _prepared(model_path, Rloo(aggregation="constant"), BYPASS, noise=0.0)
    groups = [Group(id=g.id, trajectories=tuple(_without_tools(t) for t in g.trajectories)) for g in groups]
    groups = _noisy(learner, groups, np.random.default_rng(0), 0.0)
    trainer = _RecordedRloo(
        model,
        _score,
        args=RLOOConfig(**_arguments(model_path), beta=0.0),
        train_dataset=Dataset.from_list(_rows(groups)),
        processing_class=_tokenizer(),
    )
    trainer.recorded = groups
    model.train()
    inputs = trainer._generate_and_score_completions(_rows(groups))
    rewards = [np.array([t.reward for t in group.trajectories]) for group in groups]
    expected = np.concatenate([leave_one_out(reward_G) for reward_G in rewards])
    assert inputs["advantages"].numpy() == pytest.approx(expected, abs=TOLERANCE)
    trainer.compute_loss(model, inputs).backward()
    theirs = {name: p.grad / MAX_TOKENS for name, p in model.named_parameters() if p.grad is not None}
    _, ours = _ours(learner, groups)
    _assert_equal_gradients(ours, theirs)


def _without_tools(trajectory: Trajectory) -> Trajectory:
    return _trajectory(trajectory.slot, list(trajectory.segments[:2]), trajectory.reward)


def test_the_overlong_penalty_is_that_of_trl():
    lengths = np.arange(1, 61)
    punish = get_soft_overlong_punishment(max_completion_len=50, soft_punish_cache=10)
    expected = punish(completion_ids=[[0] * n for n in lengths])
    assert overlong_penalty(Overlong(penalty=1.0, margin=0.2), lengths, 50) == pytest.approx(expected, abs=TOLERANCE)
