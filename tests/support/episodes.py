"""Random episodes: trees of turns, as a harness may make them by whatever it does with its history."""

import msgspec
import numpy as np

from asyncrl.types import GIVEN, Branch, Episode, Group, Segment, Slot, Trajectory, Turn

CAUSES = ("history_edited", "reasoning_stripped", "parallel_call", "new_conversation")


class EpisodeWriter:
    """Tokens as a gateway first has them, each after any token that is there."""

    def __init__(self, rng: np.random.Generator, vocabulary: int = 48) -> None:
        self._rng, self._vocabulary = rng, vocabulary
        self.tokens: list[int] = []
        self.segments: list[Segment] = []
        self.branches: list[Branch] = []
        self.turns: list[Turn] = []

    @property
    def last(self) -> int:
        return len(self.tokens) - 1

    def give(self, after: int, tokens: list[int]) -> int:
        self._add(after, tokens)
        self.segments.append(Segment.given(tokens))
        return self.last

    def sample(self, after: int, lengths: list[int], version: int = 0, reward: float = 0.0) -> int:
        """A turn in one segment for each of `lengths`, a version apart."""
        start = len(self.tokens)
        for number, length in enumerate(lengths):
            tokens = self.draw(length)
            self._add(after if not number else self.last, tokens)
            logprobs = self._rng.uniform(-4.5, -3, length)
            self.segments.append(Segment.sampled(tokens, logprobs, version + number))
        self.turns.append(Turn(start, len(self.tokens), reward, tool_calls=int(self._rng.integers(0, 3))))
        return self.last

    def draw(self, length: int) -> list[int]:
        return self._rng.integers(0, self._vocabulary, length).tolist()

    def _add(self, after: int, tokens: list[int]) -> None:
        if after != self.last:
            self.branches.append(Branch(len(self.tokens), after, str(self._rng.choice(CAUSES))))
        self.tokens += tokens

    def trajectory(self, slot: Slot, reward: float) -> Trajectory:
        return Trajectory(
            slot=slot,
            prompt=f"p/{slot.group}",
            segments=tuple(self.segments),
            reward=reward,
            finish="stop",
            started=0.0,
            finished=10.0,
            engine="e",
            episode=Episode(
                branches=tuple(self.branches),
                turns=tuple(self.turns),
                model_s=4.0,
                tools_s=3.5,
                wasted_tokens=int(self._rng.integers(0, 9)),
            ),
        )


def random_episode(
    rng: np.random.Generator,
    slot: Slot,
    *,
    prompt: list[int] | None = None,
    reward: float = 0.0,
    turn_rewards: bool = False,
    most: int = 8,
) -> Trajectory:
    """Given and sampled tokens in any order, each after the last token, any earlier one, or nothing."""
    writer = EpisodeWriter(rng)
    writer.give(-1, prompt or writer.draw(int(rng.integers(1, 6))))
    for _ in range(rng.integers(1, most)):
        kind = rng.random()
        after = writer.last if kind < 0.5 else int(rng.integers(0, writer.last + 1))
        if kind > 0.9 or rng.random() < 0.4:
            writer.give(-1 if kind > 0.9 else after, writer.draw(int(rng.integers(1, 7))))
        else:
            lengths = rng.integers(1, 6, rng.integers(1, 3)).tolist()
            writer.sample(after, lengths, reward=float(rng.integers(-2, 3)) if turn_rewards else 0.0)
    if not writer.turns:
        writer.sample(writer.last, [3])
    return writer.trajectory(slot, reward)


def random_group(rng: np.random.Generator, group: int, *, turn_rewards: bool = False, one_prompt: bool = True) -> Group:
    prompt = rng.integers(0, 48, rng.integers(2, 7)).tolist()
    return Group(
        id=group,
        trajectories=tuple(
            random_episode(
                rng,
                Slot(group, sample),
                prompt=prompt if one_prompt else [*prompt[: rng.integers(1, len(prompt) + 1)], sample],
                reward=float(sample % 2),
                turn_rewards=turn_rewards,
            )
            for sample in range(3)
        ),
    )


def before(trajectory: Trajectory) -> list[int]:
    """The token that each goes on from, by the definition."""
    assert trajectory.episode is not None
    found = list(range(-1, len(trajectory.tokens) - 1))
    for branch in trajectory.episode.branches:
        found[branch.start] = branch.after
    return found


def context(trajectory: Trajectory, place: int) -> list[int]:
    """The places of all that the token there has seen, in order."""
    parents, found = before(trajectory), list[int]()
    while (place := parents[place]) >= 0:
        found.append(place)
    return found[::-1]


def turn_alone(trajectory: Trajectory, number: int) -> Trajectory:
    """A turn as a trajectory of its own: what it had seen was given."""
    assert trajectory.episode is not None
    turn = trajectory.episode.turns[number]
    tokens, logprobs, versions = trajectory.tokens, trajectory.logprobs, trajectory.versions
    seen = tokens[context(trajectory, turn.start)]
    sampled = [
        Segment.sampled(tokens[turn.start : turn.stop][own], logprobs[turn.start : turn.stop][own], int(version))
        for version in np.unique(versions[turn.start : turn.stop])
        for own in [versions[turn.start : turn.stop] == version]
    ]
    assert GIVEN not in versions[turn.start : turn.stop]
    return msgspec.structs.replace(trajectory, segments=(Segment.given(seen), *sampled), episode=None)
