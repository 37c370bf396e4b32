"""What a head learns from, what it is judged by, and what it never touches."""

import msgspec
import pytest
import torch
from torch import Tensor

from asyncrl.config.drafter import DrafterTraining, Eagle3Drafter
from asyncrl.drafting.checkpoint import fresh_head
from asyncrl.drafting.learner import DrafterLearner
from asyncrl.drafting.windows import Window
from tests.support.draft_windows import KINDS, TARGET, random_head, random_window, target_matrices

SETTINGS = DrafterTraining(lr=1e-2, unroll=3)


def learner(kind: str, **changes: object) -> DrafterLearner:
    return DrafterLearner(random_head(kind), *target_matrices(), msgspec.structs.replace(SETTINGS, **changes))


def windows(kind: str, count: int = 6) -> list[Window]:
    return [random_window(kind, 10 + 3 * seed, prompt=3, seed=seed) for seed in range(count)]


def known_target(kind: str, shift: int) -> tuple[list[Window], Tensor, Tensor]:
    """Tokens are random, and after each the target is sure of one that is a function of it alone.

    So the head can know it from the embedding of the newest token, and from nothing older.
    """
    embedding_V_E, output_V_E = target_matrices()
    after_V = torch.randperm(TARGET.vocabulary, generator=torch.Generator().manual_seed(5))
    made: list[Window] = []
    for seed in range(24):
        tokens_T = random_window(kind, 40, seed=seed).tokens_T % 12
        knows_T = after_V[tokens_T.long().roll(-shift)]
        taps = None if kind == "eagle" else embedding_V_E[tokens_T.long()].repeat(1, 2)
        hidden = 0.5 * output_V_E[knows_T]
        made.append(random_window(kind, 40, seed=seed, tokens_T=tokens_T, hidden_T_E=hidden, taps_T_R=taps))
    return made, embedding_V_E, output_V_E


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_right_shift_can_be_learned(kind: str) -> None:
    lengths: dict[int, float] = {}
    for shift in (0, 1):  # the target's own states, and those one token too early: the head would have to look ahead
        made, *matrices = known_target(kind, shift)
        trained = DrafterLearner(random_head(kind), *matrices, DrafterTraining(lr=1e-2, unroll=2, hidden_weight=0.0))
        for _ in range(15):
            for start in range(0, 20, 4):
                trained.update(made[start : start + 4])
        lengths[shift] = trained.evaluate(made[20:], 3).length
    assert lengths[0] > 3.7, "of 1 + 3"
    assert lengths[1] < 1.3


def uniform_head(kind: str, vocabulary: int = 0) -> DrafterLearner:
    """A head of zeros: every token it can draft is as likely as any other."""
    drafter = Eagle3Drafter(draft_vocabulary=vocabulary)
    counts_V = torch.zeros(TARGET.vocabulary)
    counts_V[torch.tensor([40, 3, 17, 5])] = torch.tensor([9.0, 8.0, 7.0, 6.0])
    head = fresh_head(drafter, TARGET, 0, counts_V) if kind == "eagle3" else random_head("eagle")
    for parameter in head.parameters():
        parameter.data.zero_()
    return DrafterLearner(head, *target_matrices(), SETTINGS)


@pytest.mark.parametrize("kind", KINDS)
def test_expected_acceptance_by_hand(kind: str) -> None:
    """A target that is sure accepts each of V equally likely drafts with the chance 1 / V."""
    _, output_V_E = target_matrices()
    sure = 100 * output_V_E[torch.arange(20)]
    found = uniform_head(kind).evaluate([random_window(kind, 20, hidden_T_E=sure)], 3)
    chance = 1 / TARGET.vocabulary
    assert found.rates == pytest.approx((chance, chance**2, chance**3), rel=1e-4)
    assert found.length == pytest.approx(1 + chance + chance**2 + chance**3)
    assert found.tokens == 19


def test_a_reduced_vocabulary_holds_the_frequent_tokens_and_accepts_only_them() -> None:
    reduced = uniform_head("eagle3", 4)
    drafts_U = reduced.head.drafts_U
    assert drafts_U is not None
    assert drafts_U.tolist() == [3, 5, 17, 40]
    _, output_V_E = target_matrices()
    given = random_window("eagle3", 20)
    p_T_V = (given.hidden_T_E[1:] @ output_V_E.t()).softmax(-1)
    expected = p_T_V[:, [3, 5, 17, 40]].clamp(max=0.25).sum(-1).mean()
    assert reduced.evaluate([given], 1).rates == pytest.approx((expected.item(),), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_lowers_the_loss_and_leaves_the_target_alone(kind: str) -> None:
    embedding_V_E, output_V_E = (matrix.requires_grad_() for matrix in target_matrices())
    given = windows(kind)
    for window in given:
        window.hidden_T_E.requires_grad_()
    trained = DrafterLearner(random_head(kind), embedding_V_E, output_V_E, SETTINGS)
    copies = [tensor.detach().clone() for tensor in (embedding_V_E, output_V_E)]
    losses = [trained.update(given).loss for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    assert embedding_V_E.grad is None
    assert output_V_E.grad is None
    assert all(window.hidden_T_E.grad is None for window in given)
    assert all(torch.equal(now, then) for now, then in zip((embedding_V_E, output_V_E), copies, strict=True))


def test_the_loss_is_the_same_whatever_other_windows_hold() -> None:
    """Two windows of as many tokens: their mean is the mean of each alone."""
    one, two = random_window("eagle3", 20, seed=1), random_window("eagle3", 20, seed=2)
    alone = [learner("eagle3").update([window]).loss for window in (one, two)]
    assert learner("eagle3").update([one, two]).loss == pytest.approx(sum(alone) / 2, rel=1e-5)


def test_the_gate_compares_with_what_was_published() -> None:
    trained, given = learner("eagle3"), windows("eagle3")
    same = trained.compare(given, 3)
    assert same.candidate == same.published
    assert not same.is_better
    for _ in range(15):
        trained.update(given)
    better = trained.compare(given, 3)
    assert better.is_better
    assert better.published == same.published
    trained.mark_published()
    assert not trained.compare(given, 3).is_better
    trained.set_target(*target_matrices(1))
    moved = trained.compare(given, 3)
    assert moved.candidate == moved.published, "both are judged by the target as it is now"
    assert moved.candidate.length < better.candidate.length


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_learner_goes_on_bit_for_bit(kind: str) -> None:
    given = windows(kind)
    first, second = learner(kind), learner(kind)
    for _ in range(3):
        first.update(given)
    state = {name: tensor.clone() for name, tensor in first.state().items()}
    assert {name.partition("/")[0] for name in state} == {"updates", *dict(first.head.named_parameters())}
    second.restore(state)
    assert [first.update(given) for _ in range(3)] == [second.update(given) for _ in range(3)]


def test_windows_with_nothing_to_draft_change_nothing() -> None:
    trained, given = learner("eagle"), [random_window("eagle", 3, prompt=4)]
    assert trained.update(given).tokens == 0
    assert trained.updates == 0
    assert trained.evaluate(given, 2).rates == (0.0, 0.0)
    assert not trained.compare(given, 2).is_better
