"""Hidden states that the trainer gives away: those of its own forward, at the right tokens, within the budget."""

from pathlib import Path

import numpy as np
import torch

from asyncrl.config import Run
from asyncrl.config.drafter import DrafterTraining
from asyncrl.drafting.heads import HeadConfig
from asyncrl.drafting.idle_gate import BusyFlag
from asyncrl.drafting.reading import read_windows
from asyncrl.training.hidden_capture import HiddenTap
from asyncrl.training.learner import Learner
from asyncrl.types import Group, Segment, Slot, Trajectory
from tests.support.episodes import EpisodeWriter
from tests.support.tiny_model import tiny_checkpoint

TAPS = (0, 1)


def _groups(count: int, seed: int = 0) -> list[Group]:
    """Groups of two answers with different rewards, so that all of them are learned from."""
    random = np.random.default_rng(seed)
    groups: list[Group] = []
    for group in range(count):
        prompt = random.integers(0, 48, 6)
        answers = [random.integers(0, 48, length) for length in (4, 9)]
        groups.append(
            Group(
                id=group,
                trajectories=tuple(
                    Trajectory(
                        slot=Slot(group, sample),
                        prompt=str(group),
                        segments=(Segment.given(prompt), Segment.sampled(answer, np.full(len(answer), -1.0), 0)),
                        reward=float(sample),
                        finish="stop",
                        started=0.0,
                        finished=1.0,
                        engine="e",
                        precision="fp32",
                    )
                    for sample, answer in enumerate(answers)
                ),
            )
        )
    return groups


def _learner(path: Path, settings: DrafterTraining) -> Learner:
    tiny_checkpoint(path)
    learner = Learner(path, Run())
    learner.hidden = HiddenTap(settings, TAPS, seed=0)
    return learner


def test_windows_hold_what_one_forward_over_each_sample_alone_gives(tmp_path: Path) -> None:
    learner = _learner(tmp_path, DrafterTraining(window_tokens=10))
    groups = _groups(3)
    config = HeadConfig(kind="eagle3", target=learner.model_config, taps=TAPS, vocabulary=48)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    expected = {w.slot: w for w in read_windows(learner.model, config, trajectories, longest=10)}
    learner.accumulate(groups)
    assert learner.hidden is not None
    found = learner.hidden.drain()
    assert {window.slot for window in found} == expected.keys()
    for window in found:
        alone = expected[window.slot]
        assert (window.start, window.answer_length) == (alone.start, alone.answer_length)
        assert window.tokens_T.tolist() == alone.tokens_T.tolist()
        assert window.sampled_T.tolist() == alone.sampled_T.tolist()
        torch.testing.assert_close(window.hidden_T_E.float(), alone.hidden_T_E, atol=1e-4, rtol=1e-2)
        assert window.taps_T_R is not None
        torch.testing.assert_close(window.taps_T_R.float(), alone.taps_T_R, atol=1e-4, rtol=1e-2)
        assert not window.hidden_T_E.requires_grad
    assert learner.hidden.drain() == []


def test_the_update_is_the_same_with_and_without_a_drafter(tmp_path: Path) -> None:
    with_tap, without = _learner(tmp_path, DrafterTraining()), _learner(tmp_path, DrafterTraining())
    without.hidden = None
    for learner in (with_tap, without):
        learner.accumulate(_groups(4))
        learner.step()
    for (name, one), (_, other) in zip(with_tap.tensors(), without.tensors(), strict=True):
        assert torch.equal(one, other), name


def test_a_step_gives_no_more_than_its_budget_and_then_takes_all_answers_with_the_same_chance(tmp_path: Path) -> None:
    budget = 120
    learner = _learner(tmp_path, DrafterTraining(tokens_per_step=budget))
    assert learner.hidden is not None
    lengths: list[int] = []
    for step in range(20):
        learner.accumulate(_groups(40, seed=step))
        learner.step()
        windows = learner.hidden.drain()
        assert sum(map(len, windows)) < budget + 15, "at most one answer beyond it"
        assert all(window.version == step for window in windows)
        lengths += [window.answer_length for window in windows if step]
    assert 0.35 < np.mean(np.array(lengths) == 9) < 0.65


def test_the_flag_is_seen_by_another_holder_and_cleared_by_an_error(tmp_path: Path) -> None:
    trainer, drafter = BusyFlag(tmp_path / "busy"), BusyFlag(tmp_path / "busy")
    assert not drafter.is_set
    try:
        with trainer.set():
            assert drafter.is_set
            raise RuntimeError
    except RuntimeError:
        assert not drafter.is_set


def test_windows_of_an_episode_follow_its_paths(tmp_path: Path) -> None:
    """Tokens of a window follow one another, none is in two windows, and each has the states of its own path."""
    learner = _learner(tmp_path, DrafterTraining(window_tokens=1000))
    config = HeadConfig(kind="eagle3", target=learner.model_config, taps=TAPS, vocabulary=48)
    trajectories: list[Trajectory] = []
    for sample in range(2):
        writer = EpisodeWriter(np.random.default_rng(sample))
        prompt = writer.give(-1, [1, 2, 3, 4])
        first = writer.sample(prompt, [5])
        writer.sample(writer.give(prompt, [7, 8]), [4])
        writer.sample(writer.give(first, [9]), [3])
        trajectories.append(writer.trajectory(Slot(0, sample), float(sample)))
    expected = list(read_windows(learner.model, config, trajectories, longest=1000))
    assert [(w.start, w.tokens_T.tolist()) for w in expected if w.slot.sample == 0] == [
        (0, trajectories[0].tokens[[0, 1, 2, 3, 9, 10, 11, 12, 13]].tolist()),
        (4, trajectories[0].tokens[[4, 5, 6, 7, 8, 15, 16, 17]].tolist()),
    ]
    learner.accumulate([Group(id=0, trajectories=tuple(trajectories))])
    assert learner.hidden is not None
    found = learner.hidden.drain()
    assert len(found) == len(expected)
    for window, alone in zip(found, expected, strict=True):
        assert (window.slot, window.start, window.answer_length) == (alone.slot, alone.start, alone.answer_length)
        assert window.tokens_T.tolist() == alone.tokens_T.tolist()
        assert window.sampled_T.tolist() == alone.sampled_T.tolist()
        torch.testing.assert_close(window.hidden_T_E.float(), alone.hidden_T_E, atol=1e-4, rtol=1e-2)
