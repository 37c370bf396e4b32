"""algorithm=sft is transformers' own loss: the same number, and the same gradient of every parameter."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config import Checkpoint, Rollout, Run, Sentinel, Trainer
from asyncrl.config.algorithm import Importance, Reject, Supervised
from asyncrl.config.sft import Sft
from asyncrl.config.trainer import Lora
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.supervised.conversations import Conversations
from asyncrl.supervised.layout import Example, laid_out
from asyncrl.training.guardrails import Guardrails
from asyncrl.training.learner import Learner
from asyncrl.training.report import StepReport
from asyncrl.types import GIVEN, Group, Slot, Trajectory
from tests.support.chat_families import FAMILIES
from tests.support.tiny_model import tiny_checkpoint

TOLERANCE = 1e-5
IGNORED = -100
Gradients = dict[str, torch.Tensor]
CHATS: list[list[dict[str, Any]]] = [
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1+1?"},
        {"role": "assistant", "content": "It is 2."},
        {"role": "user", "content": "And 2+2?"},
        {"role": "assistant", "content": "It is 4, of course."},
    ],
    [{"role": "user", "content": "Say hello."}, {"role": "assistant", "content": "Hello."}],
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "call00001", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Graz"}'}}
        ]},
        {"role": "tool", "tool_call_id": "call00001", "name": "look_up", "content": "grey"},
        {"role": "assistant", "content": "Grey."},
        {"role": "user", "content": "Thanks."},
        {"role": "assistant", "content": "You are welcome."},
    ],
]  # fmt: skip


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_checkpoint(directory, vocab_size=640, max_position_embeddings=1024)
    return FAMILIES["qwen2.5"].save(directory)


def examples(directory: Path, *, train_on: str = "assistant") -> list[Example]:
    settings = msgspec.convert({"path": "x", "train_on": train_on}, Sft)
    read = Conversations(settings, load_tokenizer(directory), Rollout()).turns
    found = [laid_out(f"x:{number}", read({"messages": chat}, "x"), 1000) for number, chat in enumerate(CHATS)]
    return [example for example in found if example is not None]


def groups(found: Sequence[Example], *, version: int = 0) -> list[Group]:
    return [
        Group(id=number, trajectories=(example.trajectory(Slot(number, 0), version, 0.0),))
        for number, example in enumerate(found)
    ]


def learner(model_path: Path, **changes: Any) -> Learner:
    settings: dict[str, Any] = {
        "trainer": Trainer(lr=1e-2, grad_clip=1e9, device="cpu"),
        "rollout": Rollout(group_size=1, max_tokens=64, temperature=0.7, top_k=5),
        "algorithm": Supervised(),
    }
    return Learner(model_path, msgspec.structs.replace(Run(), **settings | changes))


def ours(learner: Learner, found: Sequence[Sequence[Group]]) -> tuple[StepReport, Gradients]:
    """A step of several calls, and its gradients under Hugging Face names."""
    gradients: Gradients = {}

    def read(*_: object) -> None:
        """The names are views into the weights: show the gradient through them."""
        for parameter in learner.model.parameters():
            assert parameter.grad is not None
            parameter.data.copy_(parameter.grad)
        gradients.update({name: tensor.clone() for name, tensor in learner.tensors()})

    learner.optimizer.register_step_pre_hook(read)
    for each in found:
        learner.accumulate(each)
    return learner.step(), gradients


def labelled(trajectory: Trajectory) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.from_numpy(trajectory.tokens.astype(np.int64))
    said = torch.from_numpy(trajectory.versions != GIVEN)
    return tokens[None], torch.where(said, tokens, IGNORED)[None]


def theirs(model_path: Path, found: Sequence[Group]) -> tuple[float, Gradients]:
    """Each example alone, by `labels`, weighted by its tokens: the mean over the tokens of all."""
    model = AutoModelForCausalLM.from_pretrained(model_path)
    trajectories = [trajectory for group in found for trajectory in group.trajectories]
    total = 0.0
    for trajectory in trajectories:
        tokens, labels = labelled(trajectory)
        share = trajectory.sampled_tokens / sum(each.sampled_tokens for each in trajectories)
        loss = share * model(input_ids=tokens, labels=labels).loss
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: Gradients, expected: Gradients) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=TOLERANCE, rtol=TOLERANCE, msg=name)


def _backend(model_path: Path, backend: Literal["native", "transformers"]) -> Checkpoint:
    return Checkpoint(path=str(model_path), backend=backend)


@pytest.mark.parametrize("train_on", ["assistant", "last"])
@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_packed_chats_have_transformers_loss_and_gradients(model_path: Path, train_on: str, backend: Any) -> None:
    """Whatever rollouts are sampled at, and whatever the correction: the default one weighs and rejects."""
    found = groups(examples(model_path, train_on=train_on))
    report, gradients = ours(learner(model_path, model=_backend(model_path, backend)), [found])
    loss, expected = theirs(model_path, found)
    assert report.loss == pytest.approx(loss, abs=TOLERANCE)
    assert report.tokens == sum(t.sampled_tokens for group in found for t in group.trajectories)
    assert_same(gradients, expected)


def test_what_is_trained_is_the_assistants_with_its_end(model_path: Path) -> None:
    tokenizer = load_tokenizer(model_path)
    (trajectory,) = groups(examples(model_path))[0].trajectories
    said = [tokenizer.decode(each.tokens, special_tokens=True) for each in trajectory.segments if each.version != GIVEN]
    assert said == ["It is 2.<|im_end|>", "It is 4, of course.<|im_end|>"]


def test_packing_several_examples_in_a_row_changes_nothing(model_path: Path) -> None:
    """Together or one by one, in one batch or in several, delivered at once or in parts."""
    found = groups(examples(model_path))
    whole, expected = ours(learner(model_path), [found])
    for budget, calls in ((10_000, [[group] for group in found]), (1, [found]), (200, [found[:1], found[1:]])):
        trainer = Trainer(lr=1e-2, grad_clip=1e9, device="cpu", token_budget=budget)
        report, gradients = ours(learner(model_path, trainer=trainer), calls)
        assert report.loss == pytest.approx(whole.loss, abs=TOLERANCE)
        assert_same(gradients, expected)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_every_aggregation(model_path: Path, aggregation: Any) -> None:
    found = groups(examples(model_path))
    report, _ = ours(learner(model_path, algorithm=Supervised(aggregation=aggregation)), [found])
    model = AutoModelForCausalLM.from_pretrained(model_path)
    means = []
    for group in found:
        (trajectory,) = group.trajectories
        tokens, labels = labelled(trajectory)
        means.append((model(input_ids=tokens, labels=labels).loss.item(), trajectory.sampled_tokens))
    expected = {
        "token": sum(mean * n for mean, n in means) / sum(n for _, n in means),
        "sequence": sum(mean for mean, _ in means) / len(means),
        "constant": sum(mean * n for mean, n in means) / 64 / len(means),
    }
    assert report.loss == pytest.approx(expected[aggregation], abs=TOLERANCE)


def test_a_template_that_leaves_out_earlier_reasoning_trains_each_turn_in_its_own_context(tmp_path: Path) -> None:
    """One tree of tokens has the loss and the gradients of the turns as rows of their own, by transformers."""
    tiny_checkpoint(tmp_path, vocab_size=640, max_position_embeddings=1024)
    FAMILIES["qwen3"].save(tmp_path)
    found = examples(tmp_path)
    assert [len(example.branches) for example in found] == [1, 0, 2]
    rows = [
        Group(id=0, trajectories=(row.trajectory(Slot(0, 0), 0, 0.0),))
        for chat in CHATS
        for turn in Conversations(Sft(path="x"), load_tokenizer(tmp_path), Rollout()).turns({"messages": chat}, "x")
        if (row := laid_out("x", [turn], 1000)) is not None
    ]
    assert len(rows) == sum(len(example.turns) for example in found)
    loss, expected = theirs(tmp_path, rows)
    report, gradients = ours(learner(tmp_path), [groups(found)])
    assert report.loss == pytest.approx(loss, abs=TOLERANCE)
    assert_same(gradients, expected)


def test_adapters_have_the_gradients_that_follow_from_transformers(model_path: Path) -> None:
    """Of W + scale B A: the gradient of B is scale dW A^T, and that of A is 0 while B is."""
    found = groups(examples(model_path))
    trainer = Trainer(lr=1e-2, grad_clip=1e9, device="cpu", lora=Lora(rank=4, alpha=8.0))
    adapted = learner(model_path, trainer=trainer)
    gradients: Gradients = {}

    def read(*_: object) -> None:
        for module, _name, adapter in adapted.model.adapted():
            assert adapter.A.grad is not None
            assert adapter.B.grad is not None
            assert not adapter.A.grad.any()
            gradients[f"{module}.weight"] = adapter.B.grad.clone()
            factors[f"{module}.weight"] = adapter.scale * adapter.A.detach().clone()

    factors: Gradients = {}
    adapted.optimizer.register_step_pre_hook(read)
    adapted.accumulate(found)
    report = adapted.step()
    loss, expected = theirs(model_path, found)
    assert report.loss == pytest.approx(loss, abs=TOLERANCE)
    assert len(gradients) == 14
    assert_same(gradients, {name: expected[name] @ factors[name].T for name in gradients})


@pytest.mark.parametrize("lora", [Lora(), Lora(rank=4)])
def test_the_held_out_loss_is_that_of_the_weights_and_changes_nothing(model_path: Path, lora: Lora) -> None:
    found = groups(examples(model_path))
    trainer = Trainer(lr=1e-2, device="cpu", lora=lora)
    watched, alone = learner(model_path, trainer=trainer), learner(model_path, trainer=trainer)
    held_out = [trajectory for group in found for trajectory in group.trajectories]
    losses = []
    for _ in range(4):
        losses.append(watched.loss(held_out))
        watched.accumulate(found[:2])
        assert watched.loss(held_out) == losses[-1], "also with half of a step accumulated"
        watched.accumulate(found[2:])
        alone.accumulate(found[:2])
        alone.accumulate(found[2:])
        report = watched.step()
        assert report.loss == pytest.approx(losses[-1], abs=TOLERANCE)
        assert alone.step() == report
    assert losses == sorted(losses, reverse=True), "it learns"
    assert losses[-1] < losses[0] - 0.05
    for (name, one), (_, other) in zip(watched.tensors(), alone.tensors(), strict=True):
        assert torch.equal(one, other), name


def test_nothing_is_derived_from_log_probabilities_that_nobody_sampled(model_path: Path) -> None:
    """Neither weights nor rejection, no smaller rate or momentum for age, no divergence, no alarm."""
    strict = Importance(
        weight="sequence", reject=(Reject(measure="ratio", over="token", low=0.9, high=1.1),), veto=0.5, max_drift=1e-9
    )
    found = examples(model_path)
    reports = []
    for correction in (strict, Importance(proximal="behaviour", weight="none", reject=(), max_drift=0)):
        trained = learner(model_path, correction=correction)
        for _ in range(3):
            trained.accumulate(groups(found, version=0))
            report = trained.step(Guardrails(Sentinel(max_kl=1e-6), "fp32").check)
            assert not report.alarms
        assert report.figures["mismatch_kl"] == report.figures["drift"] == report.figures["rejected_samples"] == 0
        assert report.figures["ess"] == report.figures["lr_scale"] == 1
        assert report.figures["momentum"] == Run().trainer.beta1, "data is not late"
        assert [share.value for share in report.shares if share.by == "age"] == ["0"]
        assert trained.age(groups(found)[0].trajectories[0]) == 0
        reports.append(report)
    assert reports[0] == reports[1]


def test_an_example_without_a_reward_counts(model_path: Path) -> None:
    trained = learner(model_path)
    before = {name: tensor.clone() for name, tensor in trained.tensors()}
    trained.accumulate(groups(examples(model_path)[1:2]))
    assert trained.step().grad_norm > 0
    assert any(not torch.equal(tensor, before[name]) for name, tensor in trained.tensors())
