"""What drafting, its training and its choice of strategies can be set to."""

from typing import ClassVar, Literal, Self

from asyncrl.config.base import AboveZero, Chosen, Fraction, Natural, NonNegative, Positive, Probability, Settings

Source = Literal["trainer", "rollout"]
"""Of the hidden states that a head learns from."""


class Strategy(Settings, frozen=True, kw_only=True):
    """One way to draft: a chain of `depth` tokens, or a tree of the `top_k` likeliest children at each node, of which
    the `verify` likeliest nodes are checked by the target."""

    depth: Natural
    """Tokens drafted along one path; 0 is plain decoding."""
    top_k: Positive = 1
    verify: Natural = 0
    """Drafted tokens that the target checks in one step; 0 is `depth`."""

    def __post_init__(self) -> None:
        if self.top_k == 1 and self.verify not in (0, self.depth):
            raise ValueError(f"verify={self.verify} needs a tree; a chain of depth={self.depth} checks all it drafts")
        if self.verify and self.verify < self.depth:
            raise ValueError(f"verify={self.verify} cannot hold one path of depth={self.depth}")

    @property
    def nodes(self) -> int:
        """Drafted tokens that the target checks."""
        return self.verify or self.depth

    @property
    def is_tree(self) -> bool:
        return self.top_k > 1


PLAIN = Strategy(depth=0)


class Adaptive(Settings, frozen=True, kw_only=True):
    """A bandit chooses the strategy by the number of running completions, and plain decoding where drafting does not
    pay.

    Strategies are tried in each range of batch sizes; the one with the most tokens per second is used.
    """

    on: bool = True
    """Off: always the drafter's own `tokens`, `top_k` and `verify`."""
    ranges: tuple[Positive, ...] = (1, 3, 5, 9, 17, 33, 65, 129, 257, 513)
    """First batch size of each range. What pays is compared within one, so a range should not be wide."""
    strategies: tuple[Strategy, ...] = ()
    """What to choose from, besides plain decoding; empty: chains of 1 to `tokens`, doubling."""
    epsilon: Fraction = 0.02
    """Share of the time in which other strategies are tried; less for those that lost clearly."""
    window: Positive = 32
    """Steps that stand for a strategy."""

    def __post_init__(self) -> None:
        if self.ranges[:1] != (1,) or list(self.ranges) != sorted(set(self.ranges)):
            raise ValueError(f"ranges={list(self.ranges)} must rise from 1 on")


class DrafterTraining(Settings, frozen=True, kw_only=True):
    """How a head is kept in line with the policy, from hidden states that the trainer and the rollouts have anyway."""

    on: bool = True
    """Off: the head stays as it was loaded."""
    source: Literal["auto", "trainer", "rollout", "both"] = "auto"
    """Who gives hidden states: the trainer, of completions that it learns from, or the native engine while it decodes,
    also of groups whose rewards are all equal, which no trainer looks at, but of few prompts. Both: half of them each.
    `auto`: the trainer, or the engine where `trainer.context_parallel` cuts completions."""
    spot: bool = True
    """Train while the policy's trainer waits, at the lowest priority; off: all the time."""
    share: Fraction = 0.05
    """Of the time in which the policy's trainer computes, used for training as well: a trainer that hardly ever waits
    would leave the head as it was. 0: only while it waits."""
    lr: AboveZero = 3e-3
    batch_tokens: Positive = 1024
    """Tokens of one update of the head."""
    unroll: Positive = 4
    """Drafting steps that the loss looks ahead, each fed with the head's own state."""
    decay: Fraction = 0.8
    """Weight of each further step, relative to the one before."""
    hidden_weight: NonNegative = 0.5
    """Of SmoothL1 between the head's state and the target's (EAGLE only)."""
    window_tokens: Positive = 512
    """Longest stretch of one completion that is kept."""
    tokens_per_step: Positive = 2048
    """Hidden states streamed per training step, at most."""
    passes: Positive = 4
    """Times that the drafter goes over what it was sent, on average; then it waits for more."""
    max_bytes: Positive = 256 << 20
    """Hidden states held; the oldest go first."""
    held_out: Probability = 0.1
    """Share of the windows that judge a head and are not trained on."""
    publish_every: AboveZero = 2.0
    """Seconds of training between two looks at whether the head has become better than the published one."""

    @property
    def tokens_per_source(self) -> int:
        return self.tokens_per_step // (2 if self.source == "both" else 1)


class DrafterBase(Chosen, frozen=True, kw_only=True):
    """What the rest of the code asks about a drafter. The first three are the drafter itself or None."""

    @property
    def drafting(self) -> "Drafting | None":
        """Anything that drafts."""
        return None

    @property
    def head(self) -> "HeadDrafter | None":
        """A head with weights of its own."""
        return None

    @property
    def ngram(self) -> "NgramDrafter | None":
        """Drafts that are looked up in the text."""
        return None

    @property
    def possible_strategies(self) -> list[Strategy]:
        """All that may be chosen while decoding, plain decoding perhaps among them."""
        return [PLAIN]

    @property
    def has_trees(self) -> bool:
        return any(strategy.is_tree for strategy in self.possible_strategies)

    @property
    def trains(self) -> bool:
        """Whether a process of its own trains it during the run."""
        return False


class NoDrafter(DrafterBase, frozen=True, kw_only=True, tag="none"):
    """Plain decoding, one token per step."""

    @property
    def drafting(self) -> None:
        return None


class Drafting(DrafterBase, frozen=True, kw_only=True):
    """What every drafter has."""

    tokens: Positive = 3
    """Tokens drafted per step, along one path."""
    top_k: Positive = 1
    """Children of each drafted token; more than 1 drafts a tree (native engine only)."""
    verify: Natural = 0
    """Drafted tokens checked per step; 0 is `tokens`. A tree needs more."""
    adaptive: Adaptive = Adaptive()
    by_batch: tuple[tuple[Positive, Positive, Natural], ...] = ()
    """A fixed table instead of the bandit, vLLM only: draft tokens by the number of running requests, as
    [[first, last, tokens], ...]; 0 switches drafting off there."""

    def __post_init__(self) -> None:
        expected = 1
        for first, last, tokens in self.by_batch:
            if first != expected or last < first or tokens > self.tokens:
                raise ValueError(
                    f"by_batch has [{first}, {last}, {tokens}], but ranges must follow each other from 1 on, and none "
                    f"may draft more than tokens={self.tokens}"
                )
            expected = last + 1
        _ = self.strategy  # refuses what does not fit together

    @property
    def strategy(self) -> Strategy:
        """The one used without the bandit."""
        return Strategy(depth=self.tokens, top_k=self.top_k, verify=self.verify)

    @property
    def strategies(self) -> list[Strategy]:
        """The bandit's choice: plain decoding and the given ones; if none are given, chains of 1, 2, 4, ... and what
        the drafter is set to."""
        depths = [1 << power for power in range(self.tokens.bit_length()) if 1 << power < self.tokens]
        chains = [*(Strategy(depth=depth) for depth in depths), self.strategy]
        return [PLAIN, *(strategy for strategy in self.adaptive.strategies or chains if strategy.depth)]

    @property
    def possible_strategies(self) -> list[Strategy]:
        return self.strategies if self.adaptive.on else [self.strategy]

    @property
    def drafting(self) -> Self:
        return self


class NgramDrafter(Drafting, frozen=True, kw_only=True, tag="ngram"):
    """Drafts what followed the last few tokens earlier in the same text, or in completions to the same prompt."""

    min_match: Positive = 2
    max_match: Positive = 4

    @property
    def ngram(self) -> Self:
        return self


class HeadDrafter(Drafting, frozen=True, kw_only=True):
    """A drafter with a small model of its own, its head."""

    architecture: ClassVar[Literal["eagle", "eagle3"]]
    path: str = ""
    """Directory of a trained head; empty: a fresh one, which has to learn first."""
    training: DrafterTraining = DrafterTraining()

    @property
    def head(self) -> Self:
        return self

    @property
    def uses_target_output(self) -> bool:
        """Whether it drafts with the target's own output matrix, from its last hidden state."""
        return self.architecture == "eagle"

    @property
    def vocabulary(self) -> int:
        """Tokens that the head can draft; 0 is all of them."""
        return 0

    @property
    def trains(self) -> bool:
        return self.training.on


class EagleDrafter(HeadDrafter, frozen=True, kw_only=True, tag="eagle"):
    """A small head that drafts from the target's last hidden state, with the target's own output matrix."""

    architecture = "eagle"


class Eagle3Drafter(HeadDrafter, frozen=True, kw_only=True, tag="eagle3"):
    """A small head that drafts from the hidden states of three layers, with an output matrix of its own."""

    architecture = "eagle3"

    draft_vocabulary: Natural = 0
    """Tokens that the head can draft, the most frequent ones; 0 is all of them."""

    @property
    def vocabulary(self) -> int:
        return self.draft_vocabulary


ActiveDrafter = NgramDrafter | EagleDrafter | Eagle3Drafter
DrafterSettings = NoDrafter | ActiveDrafter
