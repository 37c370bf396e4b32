"""Episodes with branches in training: the same loss and gradient as that of every turn by itself."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config import Run
from asyncrl.config.algorithm import (
    Cispo,
    CustomAlgorithm,
    Dapo,
    DrGrpo,
    Grpo,
    Gspo,
    Importance,
    Overlong,
    Ppo,
    ReinforcePp,
    Rloo,
)
from asyncrl.config.run import Checkpoint, load
from asyncrl.config.trainer import Lora, Trainer
from asyncrl.data.arrow import decode, encode
from asyncrl.errors import ConfigError
from asyncrl.models.packed import packed_attention, row_attention, span_attention
from asyncrl.models.policy import Packing
from asyncrl.training.advantages import TokenAdvantages, with_advantages
from asyncrl.training.batches import block, pack, share
from asyncrl.training.learner import Learner
from asyncrl.types import Group, Slot, Trajectory
from tests.support.episodes import EpisodeWriter, context, random_group, turn_alone
from tests.support.random_harness import recorded_episode
from tests.support.tiny_model import tiny_checkpoint
from tests.support.training_groups import gradients_of

PACKINGS: tuple[Packing, ...] = ("shared", "packed", "padded")
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Learner:
    path = tmp_path_factory.mktemp("model")
    tiny_checkpoint(path)
    return Learner(path, RUN)


RUN = Run(correction=Importance(reject=()))


def _groups(seed: int, *, turn_rewards: bool = False, one_prompt: bool = True) -> list[Group]:
    rng = np.random.default_rng(seed)
    return [random_group(rng, group, turn_rewards=turn_rewards, one_prompt=one_prompt) for group in range(2)]


def _turn_advantages(group: Group) -> list[list[float]]:
    """GRPO's, written out: R + r, less the mean over episodes of the mean over turns, by the deviation likewise."""
    returns = [[t.reward + turn.reward for turn in t.episode.turns] for t in group.trajectories if t.episode]
    mean = sum(sum(each) / len(each) for each in returns) / len(returns)
    variance = sum(sum((r - mean) ** 2 for r in each) / len(each) for each in returns) / len(returns)
    return [[(r - mean) / (variance**0.5 + 1e-6) if variance else 0.0 for r in each] for each in returns]


def _alone(learner: Learner, groups: Sequence[Group]) -> tuple[float, list[torch.Tensor], int]:
    """Loss and gradient of every turn as a sample of its own, over the tokens of all."""
    total, count = torch.zeros(()), 0
    for group in groups:
        for trajectory, advantages in zip(group.trajectories, _turn_advantages(group), strict=True):
            for number, advantage in enumerate(advantages):
                single = Group(id=0, trajectories=(turn_alone(trajectory, number),))
                (batch,) = pack([block(single, [advantage])], 100_000)
                logp = learner.token_logprobs(batch)
                weight = (logp.detach() - batch.behaviour_logp_L).exp().clamp(max=2.0)
                total = total - (weight * advantage * (1 + logp - logp.detach())).sum()
                count += len(logp)
    parameters = [p for p in learner.model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(total, parameters, allow_unused=True) if total.requires_grad else []
    found = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=False)]
    return float(total.detach()) / max(count, 1), found, count


@settings(deadline=None, max_examples=12)
@given(seed=seeds, packing=st.sampled_from(PACKINGS), turn_rewards=st.booleans(), one_prompt=st.booleans())
def test_loss_and_gradient_are_those_of_every_turn_by_itself(
    learner: Learner, seed: int, packing: Packing, turn_rewards: bool, one_prompt: bool
) -> None:
    groups = _groups(seed, turn_rewards=turn_rewards, one_prompt=one_prompt)
    _check_loss(learner, groups, packing)


@pytest.mark.parametrize(
    "groups",
    [
        2,
        pytest.param(60, marks=pytest.mark.slow),
        pytest.param(334, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)]),
    ],
)
def test_loss_and_gradient_of_what_the_gateway_records(tmp_path: Path, groups: int) -> None:
    """Up to 1,000 episodes, with all that a harness may do to its history."""
    tiny_checkpoint(tmp_path, vocab_size=128)
    learner, random, branches = Learner(tmp_path, RUN), Random(1), Counter[str]()
    for number in range(groups):
        episodes = [recorded_episode(random, Slot(number, i), reward=float(i % 2), tokens=400) for i in range(3)]
        branches.update(branch.cause for each in episodes if each.episode for branch in each.episode.branches)
        _check_loss(learner, [Group(id=number, trajectories=tuple(episodes))], PACKINGS[number % len(PACKINGS)])
    assert len(branches) >= (9 if groups > 50 else 3)  # causes


def _check_loss(learner: Learner, groups: Sequence[Group], packing: Packing) -> None:
    expected, gradients, tokens = _alone(learner, groups)
    blocks = with_advantages(RUN, groups)
    assert tokens == sum(t.sampled_tokens for group in groups for t in group.trajectories)
    if not blocks:  # all that was sampled has the same reward
        assert not any(its.any() for its in gradients)
        return
    total = torch.zeros(())
    for batch in pack(blocks, 60, packing):
        logp = learner.token_logprobs(batch)
        weight = (logp.detach() - batch.behaviour_logp_L).exp().clamp(max=2.0)
        total = total - (weight * batch.advantage_L * (1 + logp - logp.detach())).sum()
    assert float(total.detach()) / tokens == pytest.approx(expected, abs=1e-5)
    found = torch.autograd.grad(total, [p for p in learner.model.parameters() if p.requires_grad])
    for mine, its in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine / tokens, its / tokens, atol=1e-5, rtol=1e-4)


@settings(deadline=None, max_examples=20)
@given(seed=seeds, packing=st.sampled_from(PACKINGS), one_prompt=st.booleans())
def test_every_sampled_token_is_predicted_once_from_what_it_has_seen(
    learner: Learner, seed: int, packing: Packing, one_prompt: bool
) -> None:
    groups = _groups(seed, one_prompt=one_prompt)
    (batch,) = pack([block(group, [1.0] * 3) for group in groups], 1_000_000, packing)
    of_slot = {t.slot: t for group in groups for t in group.trajectories}
    logp_L = learner.token_logprobs(batch).detach()
    at = 0
    for answer in batch.answers:
        trajectory = of_slot.pop(answer.slot)
        for place in np.flatnonzero(trajectory.versions >= 0):
            seen = context(trajectory, int(place))
            tokens = torch.from_numpy(trajectory.tokens[seen].astype(np.int64))
            assert batch.target_L[at] == trajectory.tokens[place]
            assert batch.behaviour_logp_L[at] == trajectory.logprobs[place]
            assert batch.positions_T[batch.predict_L[at]] == len(seen) - 1
            assert batch.tokens_T[batch.predict_L[at]] == tokens[-1]
            if at % 7 == 0:  # a forward each takes its time
                hidden = learner.model(tokens, torch.arange(len(tokens)), packed_attention([len(tokens)]))
                alone = torch.log_softmax(learner.model.logits(hidden[-1]), -1)[batch.target_L[at]]
                torch.testing.assert_close(logp_L[at], alone.detach(), atol=1e-5, rtol=1e-5)
            at += 1
    assert at == len(batch.target_L)
    assert not of_slot


@settings(deadline=None, max_examples=60)
@given(seed=seeds, one_prompt=st.booleans())
def test_what_paths_have_in_common_is_computed_once_and_nothing_else_is(seed: int, one_prompt: bool) -> None:
    groups = _groups(seed, one_prompt=one_prompt)
    blocks = [block(group, [1.0] * 3) for group in groups]
    (batch,) = pack(blocks, 1_000_000)
    needed = 0
    for group, of_group in zip(groups, blocks, strict=True):
        prompt = len(of_group.prompt)
        computed = [
            {place for turn in np.flatnonzero(t.versions >= 0) for place in context(t, int(turn))}
            for t in group.trajectories
        ]
        needed += sum(sum(place >= prompt for place in each) for each in computed)
        needed += len({place for each in computed for place in each if place < prompt})
    assert len(batch.tokens_T) == needed
    assert set(np.concatenate(batch.rows).tolist()) == set(range(needed))
    # The order that flash attention needs, and its result.
    q, k, v = (torch.randn(needed, 2, 8) for _ in range(3))
    plain = row_attention(batch.rows)(0, q, k, v)
    torch.testing.assert_close(span_attention(batch.rows, "cpu", _plain_kernel)(0, q, k, v), plain)


def _plain_kernel(q, k, v, query_starts, key_starts, most_queries, most_keys):
    """Each row by itself: its last queries see all keys up to their own."""
    outs = []
    for a, b, c, d in zip(query_starts, query_starts[1:], key_starts, key_starts[1:], strict=False):
        queries, keys = int(b - a), int(d - c)
        mask = torch.ones(keys, keys, dtype=torch.bool).tril()[-queries:]
        parts = (q[a:b], k[c:d], v[c:d])
        out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in parts), attn_mask=mask)
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


@settings(deadline=None, max_examples=40)
@given(seed=seeds, packing=st.sampled_from(PACKINGS), budget=st.integers(8, 90), ranks=st.integers(1, 3))
def test_batches_are_cut_between_samples_and_every_rank_has_as_many(
    seed: int, packing: Packing, budget: int, ranks: int
) -> None:
    blocks = [block(group, [1.0] * 3) for group in _groups(seed)]
    shares = [share(blocks, budget, rank, ranks, packing) for rank in range(ranks)]
    assert len({len(batches) for batches in shares}) == 1
    busy = [batch for batches in shares for batch in batches if not batch.idle]
    slots = [answer.slot for batch in busy for answer in batch.answers]
    assert sorted(slots) == [Slot(group, sample) for group in range(2) for sample in range(3)]
    for batch in busy:
        lengths = [len(row) for row in batch.rows]
        held = len(lengths) * max(lengths) if packing == "padded" else len(batch.tokens_T)
        assert held <= budget or len(batch.answers) == 1


def _hand_made(turn_rewards: Sequence[Sequence[float]], rewards: Sequence[float]) -> Group:
    """Turns of two tokens; every second one goes on from the prompt, the others from the turn before."""
    trajectories: list[Trajectory] = []
    for sample, (own, reward) in enumerate(zip(turn_rewards, rewards, strict=True)):
        writer = EpisodeWriter(np.random.default_rng(sample))
        writer.give(-1, [1, 2, 3])
        for number, turn in enumerate(own):
            writer.sample(2 if number % 2 else writer.last, [2], reward=turn)
        trajectories.append(writer.trajectory(Slot(0, sample), reward))
    return Group(id=0, trajectories=tuple(trajectories))


def _of_turns(run: Run, group: Group) -> list[list[float]]:
    (found,) = with_advantages(run, [group])
    assert all((answer.advantages[::2] == answer.advantages[1::2]).all() for answer in found.answers)
    return [answer.advantages[::2].tolist() for answer in found.answers]


def test_rewards_of_turns_by_hand() -> None:
    """Returns 1+0, 1+4 and 0: means of the episodes 3 and 0, their mean 1.5, and the other's 0 and 3. Variance:
    ((1 - 1.5)^2 + (5 - 1.5)^2) / 2 = 6.25 of the first and 2.25 of the second, 4.25 of both."""
    group = _hand_made([[0, 4], [0]], [1, 0])
    std = 4.25**0.5
    for algorithm in (Grpo(), Gspo(), Cispo(), Dapo(overlong=Overlong())):
        found = _of_turns(Run(algorithm=algorithm), group)
        assert found == [pytest.approx([-0.5 / std, 3.5 / std], rel=1e-5), pytest.approx([-1.5 / std], rel=1e-5)]
    assert _of_turns(Run(algorithm=DrGrpo()), group) == [[-0.5, 3.5], [-1.5]]
    assert _of_turns(Run(algorithm=Rloo()), group) == [[1.0, 5.0], [-3.0]]


def test_rewards_of_turns_that_are_all_equal_teach_nothing_and_those_of_one_episode_do() -> None:
    assert with_advantages(Run(algorithm=Grpo()), [_hand_made([[2, 2], [2]], [1, 1])]) == []
    equal_episodes = _hand_made([[1, -1], [0]], [0, 0])
    std = 0.5**0.5
    found = _of_turns(Run(algorithm=Grpo()), equal_episodes)
    assert found == [pytest.approx([1 / std, -1 / std], rel=1e-5), [0.0]]


def test_rewards_of_turns_lie_at_their_ends_for_ppo_and_reinforce(learner: Learner) -> None:
    """Every token has what is still to come: 1 + 0 + 4 in the first turn, 1 + 4 in the second."""
    group = _hand_made([[0, 4], [2]], [1, 0])
    assert _of_turns(Run(algorithm=Ppo()), group) == [[5.0, 5.0], [2.0]]
    assert _of_turns(Run(algorithm=ReinforcePp(group_baseline=True)), group) == [[1.5, 1.5], [-1.5]]
    group = _hand_made([[3, 4], [2]], [1, 0])
    assert _of_turns(Run(algorithm=Ppo()), group) == [[8.0, 5.0], [2.0]]
    run = Run(algorithm=Ppo())
    (batch,) = pack(with_advantages(run, [group]), 1000)
    rewards = TokenAdvantages(run.algorithm, learner._policy, None, None, learner.ranks)._rewards(batch)
    assert rewards.tolist() == [0, 3, 0, 5, 0, 2]


def test_an_algorithm_of_the_users_that_knows_samples_only_says_so(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(algorithm=CustomAlgorithm(function=f"{__file__}:loss", advantages=f"{__file__}:centered"))
    assert _of_turns(run, _hand_made([[0, 4], [0]], [1, 0])) == [[0.5, 0.5], [-0.5]]
    assert "rewards of single turns are left out" in caplog.text


def centered(rewards: np.ndarray) -> np.ndarray:
    return rewards - rewards.mean()


def loss(tokens: object) -> None: ...


@pytest.mark.parametrize("algorithm", [Grpo(), Gspo(), Rloo(), ReinforcePp(), Ppo()], ids=lambda a: type(a).__name__)
def test_whole_steps_train_on_trees_and_count_samples_as_episodes(tmp_path: Path, algorithm: object) -> None:
    """The overlong penalty, sequence ratios and figures see one sample with all its sampled tokens."""
    tiny_checkpoint(tmp_path)
    learner = Learner(tmp_path, msgspec.structs.replace(RUN, algorithm=algorithm, trainer=Trainer(token_budget=80)))
    groups = _groups(5, turn_rewards=True)
    learner.accumulate(groups)
    report = learner.step()
    assert not report.skipped
    assert (report.samples, report.tokens) == (6, sum(t.sampled_tokens for g in groups for t in g.trajectories))
    assert report.figures["measured_tokens"] == report.tokens
    assert report.grad_norm > 0


def test_a_harness_that_was_never_answered_is_left_out(learner: Learner) -> None:
    group = _hand_made([[0, 0], [0]], [1, 0])
    writer = EpisodeWriter(np.random.default_rng(0))
    writer.give(-1, [1, 2, 3])
    nothing = writer.trajectory(Slot(0, 2), 0.0)
    (found,) = with_advantages(RUN, [msgspec.structs.replace(group, trajectories=(*group.trajectories, nothing))])
    assert [answer.slot for answer in found.answers] == [Slot(0, 0), Slot(0, 1)]


@pytest.mark.parametrize(
    "trainer", [Trainer(checkpoint_activations=True), Trainer(lora=Lora(rank=2, alpha=4.0))], ids=["recomputed", "lora"]
)
def test_trees_with_recomputed_layers_and_adapters(tmp_path: Path, trainer: Trainer) -> None:
    """Shared or unrolled, plain or recomputed: the same gradient."""
    tiny_checkpoint(tmp_path)
    found: list[list[torch.Tensor]] = []
    for packing, own in (("shared", trainer), ("packed", trainer), ("shared", Trainer(lora=trainer.lora))):
        learner = Learner(tmp_path, msgspec.structs.replace(RUN, trainer=own))
        learner.model.packing = packing
        learner.accumulate(_groups(3, turn_rewards=True))
        found.append(gradients_of(learner))
    for other in found[1:]:
        for mine, its in zip(found[0], other, strict=True):
            torch.testing.assert_close(mine, its, atol=1e-3, rtol=1e-4)
    assert any(gradient.abs().max() > 1e-3 for gradient in found[0])


def test_a_model_of_transformers_learns_from_trees_what_our_decoder_learns(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    native = Learner(tmp_path, RUN)
    through = Learner(
        tmp_path, msgspec.structs.replace(RUN, model=Checkpoint(path=str(tmp_path), backend="transformers"))
    )
    assert through.model.packing == "packed"
    for learner in (native, through):
        learner.accumulate(_groups(4, turn_rewards=True, one_prompt=False))
    first, second = native.step(), through.step()
    assert (first.tokens, first.samples) == (second.tokens, second.samples)
    assert second.loss == pytest.approx(first.loss, abs=1e-5)
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-4)


def test_what_was_stored_is_trained_as_what_was_recorded(tmp_path: Path) -> None:
    """To the last bit: by this a replay finds the same weights."""
    tiny_checkpoint(tmp_path)
    groups = _groups(6, turn_rewards=True)
    stored = [
        msgspec.structs.replace(group, trajectories=tuple(decode(encode(t)) for t in group.trajectories))
        for group in groups
    ]
    learners = [Learner(tmp_path, RUN) for _ in range(2)]
    for learner, given_groups in zip(learners, (groups, stored), strict=True):
        learner.accumulate(given_groups)
    assert all(torch.equal(a, b) for a, b in zip(*map(gradients_of, learners), strict=True))


def test_routes_of_a_harness_are_refused_and_auto_is_without() -> None:
    raw = {"agent": {"function": "my.py:agent"}, "reward": {"function": "my.py:reward"}}
    assert load({"reward": {"function": "my.py:reward"}}).replays_routes
    assert not load(raw).replays_routes
    with pytest.raises(ConfigError, match="router_replay=auto, which is off with agent"):
        load({**raw, "rollout": {"router_replay": "on"}})
