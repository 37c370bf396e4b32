"""A distillation's gradient is that of its definition, and a teacher says what transformers says."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from asyncrl.algorithms.advantages import group_relative, towards_teacher
from asyncrl.config import Rollout, Run, Trainer
from asyncrl.config.algorithm import NO_CORRECTION, Importance, ReinforcePp
from asyncrl.config.distillation import Distillation, Teacher
from asyncrl.config.trainer import Lora
from asyncrl.errors import DistillationError
from asyncrl.models.head import FAINT
from asyncrl.models.names import cut
from asyncrl.training.batches import block, pack
from asyncrl.training.learner import Learner
from asyncrl.training.report import StepReport
from asyncrl.training.teacher import Said, TeacherModel
from asyncrl.types import Group, Segment, Trajectory
from tests.support.episodes import random_group, turn_alone
from tests.support.teaching import all_logp, sampled_logp, taught
from tests.support.tiny_model import tiny_checkpoint
from tests.support.training_groups import make_groups

TEACHERS = (Teacher(path="unused", weight=3.0), Teacher(path="unused"))
"""A learner does not load them."""


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("student")
    return directory, tiny_checkpoint(directory)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Any]]:
    """Of another size and family."""
    made: list[tuple[Path, Any]] = []
    for family in ("llama", "qwen2"):
        directory = tmp_path_factory.mktemp(family)
        made.append((directory, tiny_checkpoint(directory, family, seed=5, hidden_size=48, num_hidden_layers=3)))
    return made


def _run(distill: Distillation, **parts: Any) -> Run:
    sizes = {"logits_bytes": parts.pop("logits_bytes")} if "logits_bytes" in parts else {}
    trainer = Trainer(lr=1e-3, token_budget=90, grad_clip=1e9, **sizes)
    given: dict[str, Any] = {"teachers": TEACHERS, "correction": Importance(reject=())} | parts
    return Run(distill=distill, trainer=trainer, **given)


def _on_policy(model: Any, groups: list[Group]) -> list[Group]:
    """As if the student had sampled them just now."""

    def sampled(trajectory: Trajectory) -> Trajectory:
        with torch.no_grad():
            logp = sampled_logp(model, trajectory).numpy()
        prompt, *answer = trajectory.segments
        tokens = np.concatenate([segment.tokens for segment in answer])
        return msgspec.structs.replace(trajectory, segments=(prompt, Segment.sampled(tokens, logp, 0)))

    return [Group(id=g.id, trajectories=tuple(map(sampled, g.trajectories))) for g in groups]


def _learned(learner: Learner, groups: list[Group], version: int) -> tuple[dict[str, Tensor], StepReport]:
    """Gradients of the tensors that `step` makes means of, and its report."""
    learner.version = version
    learner.accumulate(groups)
    gradient_of = {name: each.grad for name, each in learner.model.named_parameters() if each.grad is not None}
    return gradient_of, learner.step()


def _weighted(trajectory: Trajectory, logp_L: Tensor, advantage_L: Tensor, version: int) -> tuple[Tensor, Tensor]:
    """The weight of each token, and its loss before that."""
    with torch.no_grad():
        own = trajectory.versions >= 0
        mu_L = torch.tensor(trajectory.logprobs[own])
        age_L = torch.from_numpy(version - trajectory.versions[own])
        share_L = torch.where(age_L == 0, 1.0, (age_L - 1).clamp(min=0) / age_L.clamp(min=1))
        proximal_L = mu_L + share_L * (logp_L - mu_L)
        weight_L = (proximal_L - mu_L).exp().clamp(max=2.0)
    ratio_L = (logp_L - proximal_L).exp()
    clipped_L = ratio_L.clamp(0.8, 1.28)
    return weight_L, -(ratio_L * advantage_L).minimum(clipped_L * advantage_L)


def _compare(gradient_of: dict[str, Tensor], learner: Learner, model: Any, tokens: int, *, atol: float) -> None:
    """With those that transformers' model has."""
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {name: gradient for own, parts in learner.model.parts() for name, gradient in cut(gradient_of[own], parts)}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient is not None
        assert torch.allclose(found[name], gradient / tokens, rtol=1e-3, atol=atol), name


@pytest.mark.parametrize("distill", [Distillation(), Distillation(coefficient=0.5, reward=2.0)])
@pytest.mark.parametrize("version", [0, 3])
def test_the_gradient_is_that_of_the_definition(
    student: tuple[Path, Any], teachers: list[tuple[Path, Any]], distill: Distillation, version: int
) -> None:
    """Version 0: on-policy. Version 3: the weights of now are three versions on, and each token weighs by its ratio.
    Tokens are several batches of the learner and one sum here."""
    path, model = student
    groups = make_groups(3)
    if version == 0:
        groups = _on_policy(model, groups)
    groups = taught(groups, [(teachers[0][1], 3.0), (teachers[1][1], 1.0)])
    learner = Learner(path, _run(distill))
    gradient_of, report = _learned(learner, groups, version)

    model.zero_grad()
    gaps: list[Tensor] = []
    for group in groups:
        reward_G = group_relative(np.array([t.reward for t in group.trajectories]), normalize_std=True)
        for trajectory, reward in zip(group.trajectories, reward_G.tolist(), strict=True):
            logp_L = sampled_logp(model, trajectory)
            with torch.no_grad():
                gap_L = logp_L - torch.tensor(trajectory.teacher_logprobs)
                advantage_L = distill.reward * reward - distill.coefficient * gap_L
            weight_L, loss_L = _weighted(trajectory, logp_L, advantage_L, version)
            (weight_L * loss_L).sum().backward()
            gaps.append(gap_L)
    _compare(gradient_of, learner, model, report.tokens, atol=2e-5)
    assert report.figures["teacher_kl"] == pytest.approx(float(torch.cat(gaps).mean()), rel=1e-4)
    assert report.figures["informative_fraction"] == 1.0


@pytest.mark.parametrize(
    ("distill", "version"),
    [
        (Distillation(top_k=48), 0),
        (Distillation(top_k=48, divergence="forward"), 3),
        (Distillation(top_k=48, coefficient=0.5, reward=2.0), 3),
        (Distillation(top_k=5), 3),
        (Distillation(top_k=5, divergence="forward"), 0),
    ],
)
@pytest.mark.parametrize("logits_bytes", [5 * 48 * 4, 1 << 20])
def test_over_the_likeliest_tokens_it_is_that_of_torchs_divergence(
    student: tuple[Path, Any],
    teachers: list[tuple[Path, Any]],
    distill: Distillation,
    version: int,
    logits_bytes: int,
) -> None:
    """48 tokens are the whole vocabulary. What remains of fewer is one token more, by its logarithm."""
    path, model = student
    groups = make_groups(3) if version else _on_policy(model, make_groups(3))
    groups = taught(groups, [(teachers[0][1], 1.0)], top_k=distill.top_k)
    learner = Learner(path, _run(distill, logits_bytes=logits_bytes, teachers=TEACHERS[:1]))
    gradient_of, report = _learned(learner, groups, version)

    model.zero_grad()
    apart: list[Tensor] = []
    for group in groups:
        reward_G = group_relative(np.array([t.reward for t in group.trajectories]), normalize_std=True)
        for trajectory, reward in zip(group.trajectories, reward_G.tolist(), strict=True):
            logp_L_V = all_logp(model, trajectory)
            with torch.no_grad():
                teacher_L_V = all_logp(teachers[0][1], trajectory)
            policy, teacher = (_buckets(each, teacher_L_V, distill.top_k) for each in (logp_L_V, teacher_L_V))
            first, second = (teacher, policy) if distill.divergence == "reverse" else (policy, teacher)
            apart_L = functional.kl_div(first, second, reduction="none", log_target=True).sum(-1)
            logp_L = sampled_logp(model, trajectory)
            weight_L, loss_L = _weighted(trajectory, logp_L, torch.full_like(logp_L, distill.reward * reward), version)
            (weight_L * loss_L + distill.coefficient * apart_L).sum().backward()
            apart.append(apart_L.detach())
    _compare(gradient_of, learner, model, report.tokens, atol=1e-5)
    assert report.figures["teacher_divergence"] == pytest.approx(float(torch.cat(apart).mean()), abs=1e-5)
    assert report.figures["informative_fraction"] == 1.0
    assert "teacher_kl" in report.figures


def test_a_divergence_alone_has_no_correction(student: tuple[Path, Any], teachers: list[tuple[Path, Any]]) -> None:
    """With rewards it is for their part. The same samples, three versions old, are rejected and slow a step down."""
    path, _ = student
    groups = taught(make_groups(3), [(teachers[0][1], 1.0)], top_k=5)

    def learned(correction: Importance, reward: float) -> tuple[dict[str, Tensor], StepReport]:
        run = _run(Distillation(top_k=5, reward=reward), correction=correction, teachers=TEACHERS[:1])
        learner = Learner(path, run)
        learner.caution.least = 0.0  # so that the first step has an excess
        return _learned(learner, groups, 3)

    (found, report), (expected, _) = (learned(each, 0.0) for each in (Importance(), NO_CORRECTION))
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    assert (report.figures["rejected_samples"], report.figures["lr_scale"]) == (0.0, 1.0)
    _, mixed = learned(Importance(), 1.0)
    assert mixed.figures["rejected_samples"] > 0
    assert mixed.figures["lr_scale"] < 1


def test_adapters_have_the_gradient_that_follows_from_that_of_the_weights(
    student: tuple[Path, Any], teachers: list[tuple[Path, Any]]
) -> None:
    """Of W + scale B A: the gradient of B is scale dW A^T, and that of A is 0 while B is. What dW is, the definition
    says above."""
    path, _ = student
    groups = taught(make_groups(3), [(teachers[0][1], 1.0)], top_k=5)
    run = _run(Distillation(top_k=5), teachers=TEACHERS[:1])
    whole = Learner(path, run)
    of_weights, report = _learned(whole, groups, 3)
    expected = {name: gradient for own, parts in whole.model.parts() for name, gradient in cut(of_weights[own], parts)}
    lora = msgspec.structs.replace(run.trainer, lora=Lora(rank=4, alpha=8.0))
    learner = Learner(path, msgspec.structs.replace(run, trainer=lora))
    scaled_A = {module: adapter.scale * adapter.A.detach().clone() for module, _, adapter in learner.model.adapted()}
    gradient_of, of_adapters = _learned(learner, groups, 3)
    for module, name, _ in learner.model.adapted():
        wanted = expected[f"{module}.weight"] @ scaled_A[module].T
        assert torch.allclose(gradient_of[f"{name}.B"], wanted, rtol=1e-3, atol=1e-6), module
        assert not gradient_of[f"{name}.A"].any()
    assert len(gradient_of) == 2 * 14
    for figure in ("teacher_divergence", "teacher_kl"):
        assert of_adapters.figures[figure] == pytest.approx(report.figures[figure], rel=1e-5)


def _buckets(logp_L_V: Tensor, teacher_L_V: Tensor, count: int) -> Tensor:
    """In the teacher's order."""
    ordered_L_V = logp_L_V.gather(1, teacher_L_V.sort(-1, descending=True).indices)
    tail_L_1 = ordered_L_V[:, count:].logsumexp(-1, keepdim=True)
    return torch.cat((ordered_L_V[:, :count], tail_L_1), 1) if count < logp_L_V.shape[1] else ordered_L_V


@pytest.mark.parametrize("distill", [Distillation(top_k=5), Distillation(top_k=48, divergence="forward")])
@pytest.mark.parametrize("sampling", [{}, {"top_k": 4}, {"top_p": 0.7, "temperature": 0.8}])
def test_a_policy_with_its_own_likeliest_tokens_learns_nothing(
    student: tuple[Path, Any], distill: Distillation, sampling: dict[str, Any]
) -> None:
    """However it samples: the divergence is of whole distributions, at the temperature."""
    path, _ = student
    run = _run(distill, rollout=Rollout(**sampling), teachers=TEACHERS[:1])
    said = iter(TeacherModel(Teacher(path=str(path)), run).judge([t for g in make_groups(2) for t in g.trajectories]))
    groups = [
        Group(id=group.id, trajectories=tuple(_with(each, next(said)) for each in group.trajectories))
        for group in make_groups(2)
    ]
    gradient_of, report = _learned(Learner(path, run), groups, 0)
    assert report.figures["teacher_divergence"] == pytest.approx(0, abs=1e-6)
    assert max(float(gradient.abs().max()) for gradient in gradient_of.values()) / report.tokens < 1e-6


def _with(trajectory: Trajectory, said: Said) -> Trajectory:
    return msgspec.structs.replace(
        trajectory, teacher_logprob_bytes=said.logprobs.tobytes(), teacher_top_k_bytes=said.top_k.tobytes()
    )


def test_samples_with_other_likeliest_tokens_are_refused_by_name(
    student: tuple[Path, Any], teachers: list[tuple[Path, Any]]
) -> None:
    path, _ = student
    five = taught(make_groups(1), [(teachers[0][1], 1.0)], top_k=5)
    none = taught(make_groups(1), [(teachers[0][1], 1.0)])
    for groups, recorded in ((five, 5), (none, 0)):
        learner = Learner(path, _run(Distillation(top_k=8), teachers=TEACHERS[:1]))
        with pytest.raises(DistillationError, match=f"sample 0/0 has the {recorded} likeliest .* distill.top_k=8"):
            learner.accumulate(groups)


def test_what_was_recorded_with_likeliest_tokens_can_be_learned_from_without(
    student: tuple[Path, Any], teachers: list[tuple[Path, Any]]
) -> None:
    """As a replay does; also where a run has changed their number."""
    path, _ = student
    first, second = make_groups(2)
    some = taught([first], [(teachers[0][1], 1.0)], top_k=5) + taught([second], [(teachers[0][1], 1.0)], top_k=6)
    plain = taught([first, second], [(teachers[0][1], 1.0)])
    found, expected = (_learned(Learner(path, _run(Distillation())), groups, 1)[0] for groups in (some, plain))
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_the_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """One position, every token by its probability: sum of pi A grad log pi = - grad KL(pi || teacher)."""
    generator = torch.Generator().manual_seed(3)
    logits_V, teacher_V = (torch.randn(17, generator=generator, dtype=torch.float64) for _ in range(2))
    logits_V.requires_grad_()
    teacher_V = teacher_V.log_softmax(-1)
    logp_V = logits_V.log_softmax(-1)
    (wanted,) = torch.autograd.grad((logp_V.exp() * (logp_V - teacher_V)).sum(), logits_V, retain_graph=True)
    advantage_V = towards_teacher(Distillation(), torch.zeros(17), logp_V.detach(), teacher_V)
    (found,) = torch.autograd.grad(-(logp_V.exp().detach() * advantage_V * logp_V).sum(), logits_V)
    assert torch.allclose(found, wanted, atol=1e-12)


def test_a_policy_that_is_its_own_teacher_learns_nothing(student: tuple[Path, Any]) -> None:
    path, model = student
    groups = taught(_on_policy(model, make_groups(2)), [(model, 1.0)])
    learner = Learner(path, _run(Distillation()))
    learner.accumulate(groups)
    report = learner.step()
    assert report.figures["teacher_kl"] == pytest.approx(0, abs=1e-5)
    assert report.grad_norm < 1e-4


def test_a_group_of_one_and_groups_of_equal_rewards_teach(
    student: tuple[Path, Any], teachers: list[tuple[Path, Any]]
) -> None:
    path, model = student
    single = [
        Group(id=group.id, trajectories=(msgspec.structs.replace(group.trajectories[0], reward=1.0),))
        for group in taught(_on_policy(model, make_groups(3)), [(teachers[0][1], 1.0)])
    ]
    for algorithm in ({}, {"algorithm": ReinforcePp()}):
        learner = Learner(path, _run(Distillation(), **algorithm))
        learner.accumulate(single)
        assert learner.step().grad_norm > 0.1


def test_a_sample_that_no_teacher_has_seen_is_refused_by_name(student: tuple[Path, Any]) -> None:
    learner = Learner(student[0], _run(Distillation()))
    with pytest.raises(DistillationError, match="sample 0/0 has no log-probabilities of the teachers"):
        learner.accumulate(make_groups(1))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize("token_budget", [40, 10_000])
def test_a_teacher_says_what_transformers_says(
    teachers: list[tuple[Path, Any]], temperature: float, backend: Any, token_budget: int
) -> None:
    """Also of samples of several groups and turns, in any order, and of one in which nothing was sampled."""
    path, model = teachers[0]
    run = Run(rollout=Rollout(temperature=temperature), trainer=Trainer(token_budget=token_budget))
    trajectories = [t for group in make_groups(3) for t in group.trajectories][::-1]
    first, *others = trajectories[0].segments
    turns = (first, *others, Segment.given([7, 8]), Segment.sampled([9, 1], [-1.0, -2.0], 4))
    silent = msgspec.structs.replace(trajectories[1], segments=(first, Segment.given([5])))
    trajectories += [msgspec.structs.replace(trajectories[0], segments=turns), silent]
    found = TeacherModel(Teacher(path=str(path), backend=backend), run).judge(trajectories)
    for trajectory, own in zip(trajectories, found, strict=True):
        with torch.no_grad():
            expected = sampled_logp(model, trajectory, temperature).numpy()
        assert own.logprobs.dtype == np.float32
        assert np.allclose(own.logprobs, expected, atol=2e-4), "one value for each sampled token, in order"


@pytest.mark.parametrize(("vocabulary", "count"), [(48, 6), (48, 48), (30, 6), (30, 30), (64, 64)])
@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"top_k": 3}])
def test_a_teachers_likeliest_tokens_are_those_of_transformers(
    teachers: list[tuple[Path, Any]], vocabulary: int, count: int, sampling: dict[str, Any]
) -> None:
    """Of the whole distribution over 48 tokens; the student may have fewer or more, and knows no others."""
    path, model = teachers[0]
    rollout, trainer = Rollout(**sampling), Trainer(token_budget=90, logits_bytes=5 * 48 * 4)
    run = Run(rollout=rollout, trainer=trainer, distill=Distillation(top_k=count))
    trajectories = [t for group in make_groups(2) for t in group.trajectories]
    found = TeacherModel(Teacher(path=str(path)), run, vocabulary).judge(trajectories)
    for trajectory, own in zip(trajectories, found, strict=True):
        with torch.no_grad():
            logp_L_V = all_logp(model, trajectory, rollout.temperature)
        ids, said = torch.from_numpy(own.top_k[:, :count]).long(), torch.from_numpy(own.top_k[:, count:].view("f4"))
        assert int(ids.max()) < vocabulary
        assert all(len(set(row.tolist())) == count for row in ids)
        known = min(count, 48)
        expected_L_K = logp_L_V[:, :vocabulary].sort(-1, descending=True).values[:, :known]
        torch.testing.assert_close(said[:, :known], expected_L_K, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(logp_L_V.gather(1, ids[:, :known]), expected_L_K, atol=2e-4, rtol=1e-4)
        assert (said[:, known:count] == FAINT).all(), "tokens that the teacher does not have"
        tail_L = (1 - expected_L_K.exp().sum(-1)).clamp(min=0)
        torch.testing.assert_close(said[:, count].exp(), tail_L, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("sampling", [{"top_k": 5}, {"top_p": 0.7, "temperature": 0.8}])
def test_a_teacher_is_restricted_as_the_student_is(student: tuple[Path, Any], sampling: dict[str, Any]) -> None:
    """With the student's weights it says what the trainer finds, so that there is nothing to learn."""
    path, _ = student
    run = Run(rollout=Rollout(**sampling))
    groups = make_groups(2)
    (batch,) = pack([block(group, [0.0] * 4) for group in groups], 10_000)
    with torch.no_grad():
        expected = Learner(path, run).token_logprobs(batch)
    by_slot = dict(zip([answer.slot for answer in batch.answers], expected.split(batch.lengths), strict=True))
    trajectories = [t for group in groups for t in group.trajectories]
    found = TeacherModel(Teacher(path=str(path)), run).judge(trajectories)
    for trajectory, own in zip(trajectories, found, strict=True):
        assert np.allclose(own.logprobs, by_slot[trajectory.slot].numpy(), atol=1e-5)


def test_an_unknown_token_is_refused(student: tuple[Path, Any]) -> None:
    (group,) = make_groups(1, vocabulary=60)
    with pytest.raises(ValueError, match="is none of the 48 that the teacher knows"):
        TeacherModel(Teacher(path=str(student[0])), Run()).judge(group.trajectories)


def test_episodes_with_branches_are_judged_turn_by_turn(teachers: list[tuple[Path, Any]]) -> None:
    """Each turn has seen what led to it, and nothing of other branches."""
    path, model = teachers[1]
    trajectories = random_group(np.random.default_rng(4), 0, one_prompt=False).trajectories
    assert any(each.branches for each in trajectories)
    found = TeacherModel(Teacher(path=str(path)), Run()).judge(trajectories)
    for trajectory, own in zip(trajectories, found, strict=True):
        assert trajectory.episode is not None
        turns = [turn_alone(trajectory, number) for number in range(len(trajectory.episode.turns))]
        with torch.no_grad():
            expected = torch.cat([sampled_logp(model, turn) for turn in turns]).numpy()
        assert np.allclose(own.logprobs, expected, atol=2e-4)
