"""The unrolled pass of training is what drafting does token by token, aligned to the position."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from asyncrl.drafting.heads import Head
from asyncrl.drafting.unroll import Batch, batch, unrolled
from asyncrl.drafting.windows import Window
from asyncrl.models.layers import computed_rotation, signed_frequencies
from asyncrl.types import Slot
from tests.support.draft_windows import KINDS, TARGET, random_head, random_window, target_matrices

STEPS = 4


def packed(*windows: Window) -> Batch:
    given = batch(windows)
    assert given is not None
    return given


def growing_cache() -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """Attention of one token to all before it and itself, as an engine has it."""
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(_layer: int, q_T_H_D: Tensor, k_T_K_D: Tensor, v_T_K_D: Tensor) -> Tensor:
        keys.append(k_T_K_D)
        values.append(v_T_K_D)
        group = q_T_H_D.shape[1] // k_T_K_D.shape[1]
        k, v = (torch.cat(found).repeat_interleave(group, 1) for found in (keys, values))
        scores_H_T = torch.einsum("hd,thd->ht", q_T_H_D[0], k) / q_T_H_D.shape[2] ** 0.5
        return torch.einsum("ht,thd->hd", scores_H_T.softmax(-1), v).flatten()[None]

    return attend


def drafted_states(head: Head, window: Window, embedding_V_E: Tensor, start: int, steps: int) -> list[Tensor]:
    """States of a draft that begins at `start`: features of the target up to there, then the head's own states."""
    rotation = computed_rotation(signed_frequencies(TARGET.rope, TARGET.head_dim), torch.float32)
    attend = growing_cache()
    feature_T_E = head.features(window.read)
    states: list[Tensor] = []
    for place in range(start + steps):
        feature = feature_T_E[place : place + 1] if place <= start else states[-1]
        token = window.tokens_T[place + 1 : place + 2].long()
        rotate = rotation(torch.tensor([window.start + place]))
        state = head(feature, F.embedding(token, embedding_V_E), rotate, attend)
        if place >= start:
            states.append(state)
    return states


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_unrolled_states_are_those_of_drafts_token_by_token(kind: str) -> None:
    head, (embedding_V_E, _) = random_head(kind), target_matrices()
    windows = [random_window(kind, length, prompt=3, seed=length, start=7 * length) for length in (9, 12, 33)]
    steps = list(unrolled(head, packed(*windows), embedding_V_E, STEPS))
    offset = 0
    for window in windows:
        drafting = len(window) - 3  # from the last token of the prompt to the last but one of the window
        for start in range(drafting):
            depth = min(STEPS, drafting - start)
            for index, expected in enumerate(drafted_states(head, window, embedding_V_E, 2 + start, depth)):
                place = offset + start + index
                torch.testing.assert_close(steps[index].state_A_E[place], expected[0], atol=1e-4, rtol=1e-4)
                assert steps[index].valid_A[place]
        offset += drafting
    counts = [int(step.valid_A.sum()) for step in steps]
    assert counts == [sum(len(window) - 3 - index for window in windows) for index in range(STEPS)]


def test_each_position_pairs_a_feature_with_the_next_token_and_the_state_after_it() -> None:
    """Five tokens, the first two given: by hand."""
    numbers_T_E = torch.arange(5.0)[:, None].repeat(1, 2)
    window = Window(
        slot=Slot(0, 0),
        version=0,
        answer_length=4,
        start=20,
        tokens_T=torch.tensor([50, 51, 52, 53, 54], dtype=torch.int32),
        sampled_T=torch.tensor([False, True, True, True, True]),  # tokens 52, 53, 54 and the one after it
        hidden_T_E=numbers_T_E,
        taps_T_R=10 * numbers_T_E,
    )
    given = packed(window)
    # Flat order: positions 1, 2, 3 draft, position 0 lies before them.
    assert given.positions_T.tolist() == [21, 22, 23, 20]
    assert given.read_T_R[:, 0].tolist() == [10, 20, 30, 0]
    assert given.next_T.tolist() == [52, 53, 54, 51]
    assert given.goal_A_E[:, 0].tolist() == [2, 3, 4]
    assert given.drafts_A.tolist() == [True, True, True]
    assert given.goes_on_A.tolist() == [False, True, True]


def test_given_tokens_in_between_break_a_chain() -> None:
    marks = torch.tensor([True, True, False, False, True, True, True, True])
    given = packed(random_window("eagle", 8, sampled_T=marks))
    assert given.drafts_A.tolist() == [True, False, False, False, True, True, True]
    steps = list(unrolled(random_head("eagle"), given, target_matrices()[0], 3))
    assert steps[1].valid_A.tolist() == [False, False, False, False, False, True, True]
    assert steps[2].valid_A.tolist() == [False, False, False, False, False, False, True]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_no_window_sees_another(kind: str) -> None:
    head, (embedding_V_E, _) = random_head(kind), target_matrices()
    first, second = random_window(kind, 17, prompt=4, seed=1), random_window(kind, 18, prompt=4, seed=2)
    other = random_window(kind, 18, prompt=4, seed=3)
    drafting = len(first) - 4
    for one, two in zip(
        unrolled(head, packed(first, second), embedding_V_E, STEPS),
        unrolled(head, packed(first, other), embedding_V_E, STEPS),
        strict=True,
    ):
        valid = one.valid_A[:drafting]
        assert torch.equal(valid, two.valid_A[:drafting])
        torch.testing.assert_close(one.state_A_E[:drafting][valid], two.state_A_E[:drafting][valid], atol=0, rtol=0)
        assert not torch.allclose(one.state_A_E[drafting:], two.state_A_E[drafting:])


def test_windows_without_two_sampled_tokens_give_no_batch() -> None:
    assert batch([random_window("eagle", 4, prompt=4), random_window("eagle", 1)]) is None
