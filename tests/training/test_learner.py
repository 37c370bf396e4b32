"""The learner: packing, gradient equality, exact resume."""

from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.config import Run, Trainer
from asyncrl.config.algorithm import Importance
from asyncrl.errors import CheckpointError
from asyncrl.models.packed import packed_attention
from asyncrl.models.routes import RouteShape
from asyncrl.training import checkpoint
from asyncrl.training.batches import Block, block, pack
from asyncrl.training.checkpoint_manifest import MANIFEST, TrainingManifest
from asyncrl.training.learner import Learner
from asyncrl.types import GIVEN, Group, Trajectory
from tests.support.tiny_model import tiny_checkpoint
from tests.support.training_groups import make_groups

VOCABULARY = 48


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_checkpoint(directory, request.param)
    return directory


def _learner(model_path: Path, *, token_budget: int = 4096) -> Learner:
    settings = Trainer(lr=1e-3, token_budget=token_budget, grad_clip=1e9)
    return Learner(model_path, Run(trainer=settings, correction=Importance(reject=())))


def _shape(learner: Learner) -> RouteShape | None:
    return RouteShape.of(learner.model_config)


def _gradients(learner: Learner) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in learner.model.named_parameters() if p.grad is not None}


def _blocks(groups: list[Group], routes: RouteShape | None = None) -> list[Block]:
    return [block(group, [1.0] * len(group.trajectories), routes) for group in groups]


def test_packing_keeps_every_sampled_token_once_and_within_the_budget():
    groups = make_groups(5)
    batches = list(pack(_blocks(groups), token_budget=64))
    assert len(batches) > 3
    for batch in batches:
        assert batch.tokens_T.numel() <= 64 or len(batch.rows) == 1
        assert set(np.concatenate(batch.rows).tolist()) == set(range(batch.tokens_T.numel()))
    trajectories = [t for group in groups for t in group.trajectories]
    assert sum(batch.target_L.numel() for batch in batches) == sum(t.sampled_tokens for t in trajectories)
    found = sorted(float(x) for batch in batches for x in batch.behaviour_logp_L)
    assert found == sorted(float(x) for t in trajectories for x in t.logprobs[t.versions != GIVEN])


def test_a_packed_group_holds_its_prompt_once():
    (group,) = make_groups(1)
    (batch,) = pack(_blocks([group]), token_budget=10_000)
    prompt = len(group.trajectories[0].segments[0])
    answers = [t.sampled_tokens for t in group.trajectories]
    assert batch.tokens_T.numel() == prompt + sum(answers) - len(answers)
    for row, trajectory in zip(batch.rows, group.trajectories, strict=True):
        assert batch.tokens_T[torch.from_numpy(row)].tolist() == trajectory.tokens[:-1].tolist()
        assert batch.positions_T[torch.from_numpy(row)].tolist() == list(range(len(row)))
    assert batch.target_L.tolist() == [x for t in group.trajectories for x in t.tokens[prompt:].tolist()]


def test_packed_log_probabilities_equal_those_of_each_sample_alone(model_path: Path):
    """Each trajectory by itself, without packing, sharing or padding: no sample sees another."""
    learner = _learner(model_path)
    groups = make_groups(3)
    batches = list(pack(_blocks(groups), token_budget=10_000))
    assert len(batches) == 1
    targets = batches[0].target_L.tolist()
    ordered = sorted(groups, key=lambda group: -_blocks([group])[0].num_tokens)
    alone: list[torch.Tensor] = []
    for trajectory in (t for group in ordered for t in group.trajectories):
        tokens = torch.from_numpy(trajectory.tokens.astype(np.int64))
        hidden = learner.model(tokens, torch.arange(len(tokens)), packed_attention([len(tokens)]))
        logp = torch.log_softmax(learner.model.logits(hidden), dim=-1)
        prompt = len(trajectory.segments[0])
        alone.append(logp[prompt - 1 : -1].gather(1, tokens[prompt:, None]).squeeze(1))
    assert targets == [int(x) for group in ordered for t in group.trajectories for x in t.tokens[len(t.segments[0]) :]]
    assert torch.allclose(learner.token_logprobs(batches[0]), torch.cat(alone), atol=1e-5)


def test_changing_one_sample_leaves_the_others_untouched(model_path: Path):
    learner = _learner(model_path)
    (group,) = make_groups(1)
    (batch,) = pack(_blocks([group]), token_budget=10_000)
    before = learner.token_logprobs(batch)
    own = batch.rows[1][len(group.trajectories[0].segments[0]) :]
    batch.tokens_T[own] = (batch.tokens_T[own] + 1) % VOCABULARY
    after = learner.token_logprobs(batch)
    counts = [t.sampled_tokens for t in group.trajectories]
    for i, (old, new) in enumerate(zip(before.split(counts), after.split(counts), strict=True)):
        assert torch.equal(old[1:], new[1:]) == (i != 1)


def test_a_group_with_two_prompts_is_refused():
    first, second = make_groups(2)
    mixed = Group(id=0, trajectories=(first.trajectories[0], second.trajectories[0]))
    with pytest.raises(ValueError, match="does not begin with the prompt"):
        block(mixed, [1.0, 1.0])


def test_gradient_of_many_early_micro_batches_equals_that_of_one_batch(model_path: Path):
    groups = make_groups(6)
    whole, streamed = _learner(model_path), _learner(model_path, token_budget=50)
    whole.accumulate(groups)
    for group in reversed(groups):  # groups complete in any order
        streamed.accumulate([group])
    expected, found = _gradients(whole), _gradients(streamed)
    first, second = whole.step(), streamed.step()
    assert (first.tokens, first.samples) == (second.tokens, second.samples)
    assert second.loss == pytest.approx(first.loss, rel=1e-5)
    for name, gradient in expected.items():
        assert torch.allclose(found[name] / second.tokens, gradient / first.tokens, atol=1e-6), name
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
    assert second.figures == pytest.approx(first.figures, rel=1e-4)


def test_loss_is_the_token_mean_over_the_whole_step_not_a_mean_of_means(model_path: Path):
    """Against a direct computation in one expression, from the definition."""
    groups = make_groups(2)
    learner = _learner(model_path)
    total, count = torch.zeros(()), 0
    for group in groups:
        for trajectory in group.trajectories:
            advantage = 1.0 if trajectory.reward else -1.0
            alone = Group(id=0, trajectories=(trajectory,))
            (batch,) = pack([block(alone, [advantage], _shape(learner))], 10_000)
            logp = learner.token_logprobs(batch).detach()
            weight = (logp - batch.behaviour_logp_L).exp().clamp(max=2.0)
            total = total - (weight * advantage).sum()
            count += logp.numel()
    learner.accumulate(groups)
    assert learner.step().loss == pytest.approx(total.item() / count, rel=1e-4)


def test_a_step_far_off_policy_moves_the_weights_less(model_path: Path):
    """Adam's first step is proportional to the learning rate, whatever the gradient."""
    moved: list[torch.Tensor] = []
    drift = 0.0
    for limit in (lambda _: 0.0, lambda drift: drift / 4):
        correction = Importance(reject=(), max_drift=limit(drift))
        learner = Learner(model_path, Run(trainer=Trainer(lr=1e-3, weight_decay=0.0), correction=correction))
        learner.caution.least = 0.0  # engines that agree with the trainer on the same weights
        learner.version = 1  # the answers are of version 0
        before = torch.cat([p.detach().flatten().double() for p in learner.model.parameters()])
        learner.accumulate(make_groups(2))
        figures = learner.step().figures
        drift = figures["drift"]
        moved.append(torch.cat([p.detach().flatten().double() for p in learner.model.parameters()]) - before)
    assert figures["lr_scale"] == pytest.approx(0.5)
    torch.testing.assert_close(moved[1], moved[0] / 2, rtol=1e-3, atol=1e-6)


def test_answers_of_the_trainers_own_version_are_not_late_however_engines_round(model_path: Path):
    learner = Learner(model_path, Run(correction=Importance(reject=(), max_drift=1e-6)))
    learner.caution.least = 0.0
    learner.accumulate(make_groups(2))
    figures = learner.step().figures
    assert figures["mismatch_abs"] > 0.1
    assert figures["drift"] > 0.01
    assert figures["lr_scale"] == 1.0


def test_groups_without_contrast_count_tokens_but_cost_no_gradient(model_path: Path):
    (group,) = make_groups(1)
    flat = [Trajectory(**{f: getattr(t, f) for f in t.__struct_fields__} | {"reward": 1.0}) for t in group.trajectories]
    learner = _learner(model_path)
    learner.accumulate([Group(id=0, trajectories=tuple(flat))])
    report = learner.step()
    assert report.tokens == sum(t.sampled_tokens for t in flat)
    assert report.grad_norm == 0.0


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(model_path: Path):
    learner = _learner(model_path)
    before = {name: tensor.clone() for name, tensor in learner.tensors()}
    learner.accumulate(make_groups(1))
    gradient = next(learner.model.parameters()).grad
    assert gradient is not None
    gradient.view(-1)[0] = float("nan")
    report = learner.step()
    assert report.skipped
    assert report.version == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.tensors())


def test_restored_training_continues_bit_for_bit(model_path: Path, tmp_path: Path):
    straight = _learner(model_path)
    for seed in range(4):
        straight.accumulate(make_groups(2, seed))
        straight.step()
        if seed == 1:
            manifest = TrainingManifest(step=2, samples_trained=16, consumed=((0, 3),))
            saved = checkpoint.save(straight, tmp_path, manifest, model_path=model_path, keep=2)
    resumed = _learner(model_path)
    found = checkpoint.restore(resumed, saved)
    assert (found.step, found.samples_trained, found.consumed) == (2, 16, ((0, 3),))
    assert found.least_drift
    assert found.momentum_ages == 1.0, "samples of version 0: in the second step they are one version old"
    for seed in (2, 3):
        resumed.accumulate(make_groups(2, seed))
        report = resumed.step()
    assert report.figures["momentum"] == pytest.approx(0.9**4)
    assert resumed.version == straight.version
    expected = dict(straight.tensors())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.tensors())


def test_checkpoints_are_whole_pruned_and_named_by_step(model_path: Path, tmp_path: Path):
    learner = _learner(model_path)
    for step in range(1, 5):
        learner.accumulate(make_groups(1))
        learner.step()
        manifest = TrainingManifest(step=step, samples_trained=4 * step, consumed=())
        checkpoint.save(learner, tmp_path, manifest, model_path=model_path, keep=2)
    (tmp_path / ".step-9.partial").mkdir()  # what a kill in mid-save leaves behind
    assert [step for step, _ in checkpoint.numbered(tmp_path)] == [3, 4]
    assert Learner(tmp_path / "step-4", Run()).version == 0


def test_a_damaged_manifest_names_the_way_out(model_path: Path, tmp_path: Path):
    learner = _learner(model_path)
    learner.accumulate(make_groups(1))
    learner.step()
    manifest = TrainingManifest(step=1, samples_trained=4, consumed=())
    saved = checkpoint.save(learner, tmp_path, manifest, model_path=model_path, keep=1)
    (saved / MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match=r"remove .*step-1 to resume"):
        checkpoint.restore(learner, saved)


def test_each_step_tells_of_its_own_answer_that_is_furthest_off_policy(model_path: Path):
    learner = _learner(model_path)
    for number in (0, 1):
        groups = make_groups(3, seed=number)
        (batch,) = pack(_blocks(groups, _shape(learner)), token_budget=100_000)
        with torch.no_grad():
            gap_L = (learner.token_logprobs(batch) - batch.behaviour_logp_L).abs()
        tokens = {t.slot: t.sampled_tokens for group in groups for t in group.trajectories}
        slots = [answer.slot for answer in batch.answers]
        sizes = [float(part.mean()) for part in gap_L.split([tokens[slot] for slot in slots])]
        learner.accumulate(groups)
        found = learner.step().off_policy
        assert found is not None
        worst = int(np.argmax(sizes))
        assert (found.group, found.sample) == (slots[worst].group, slots[worst].sample)
        assert found.size == pytest.approx(sizes[worst], rel=1e-4)
