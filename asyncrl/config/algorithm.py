"""What an algorithm or a correction can be set to, and what the rest of the code asks about it.

Class defaults are the vetted setting. A new one is a struct here, its name in the union at the end, and a line in
`asyncrl.algorithms.registry`. Kept apart from the losses so that reading a config imports no torch.
"""

from typing import ClassVar, Literal, NamedTuple

from asyncrl.config.base import AboveZero, Chosen, Fraction, Natural, NonNegative, Settings


class Kl(Settings, frozen=True):
    """A penalty for leaving the reference, which is the model the run started from."""

    coefficient: NonNegative = 0.0
    estimator: Literal["k1", "k2", "k3"] = "k3"
    placement: Literal["loss", "reward"] = "loss"
    """Added to the loss, or taken from each token's reward (ppo and reinforce_pp, always with k1)."""


class Overlong(Settings, frozen=True):
    """Soft punishment of completions that come close to `rollout.max_tokens` (DAPO)."""

    penalty: NonNegative = 0.0
    """Taken from the reward of a completion of full length; 0 turns it off."""
    margin: Fraction = 0.2
    """Share of `rollout.max_tokens`, counted from the end, over which the penalty grows from 0."""


class Credit(NamedTuple):
    """How a reward reaches the tokens before it, where advantages are of tokens."""

    discount: float = 1.0
    trace: float = 1.0
    """Lambda of generalised advantage estimation."""
    whiten: bool = True
    """Normalise over the step."""


UserFunctions = tuple[tuple[str, str], ...]
"""The setting that names a function of the user's, and that name."""


class AlgorithmBase(Chosen, frozen=True):
    """The parts that every algorithm is put together from, and what the rest of the code asks about one."""

    kl_in_reward: ClassVar[bool] = False
    """Whether it can take a KL penalty from each token's reward."""
    learns_from_equal_rewards: ClassVar[bool] = False
    """Whether a group can matter although all of its rewards are equal."""
    needs_advantages: ClassVar[bool] = True
    """Whether the rewards teach nothing where every advantage is 0."""
    on_data: ClassVar[bool] = False
    """Whether it learns from data: no policy of the run has sampled it, so that no token has a ratio to correct, an
    age, or a temperature."""

    @property
    def compares_within_group(self) -> bool:
        """Whether the advantage of a sample is relative to the others of its group, so that one alone has none."""
        return True

    @property
    def critic_rate(self) -> float | None:
        """Learning rate of the critic; None without one."""
        return None

    @property
    def policy_from_step(self) -> int:
        """First step that trains the policy; those before train the critic alone."""
        return 0

    @property
    def credit(self) -> Credit:
        return Credit()

    @property
    def functions(self) -> UserFunctions:
        return ()

    aggregation: Literal["token", "sequence", "constant"] = "token"
    """Mean over the tokens of the step; mean over samples of their token means; or sum over a sample's tokens divided
    by `rollout.max_tokens`, mean over samples."""
    kl: Kl = Kl()
    entropy: NonNegative = 0.0
    """Coefficient of an entropy bonus."""
    router_aux_loss: NonNegative = 0.0
    """Coefficient of the load-balancing loss of a mixture of experts."""
    overlong: Overlong = Overlong()
    dynamic_sampling: bool = False
    """Groups whose rewards are all equal are dropped and replaced by others."""


class Clipped(AlgorithmBase, frozen=True):
    """The clipped ratio of PPO."""

    clip_low: Fraction = 0.2
    clip_high: NonNegative = 0.2


class Grpo(Clipped, frozen=True, tag="grpo"):
    """Group-relative advantages, clipped ratio, token mean over the whole step."""

    clip_high: NonNegative = 0.28
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation."""


class DrGrpo(Clipped, frozen=True, tag="dr_grpo"):
    """GRPO without its two biases: no division by the standard deviation, none by the completion's own length."""

    aggregation: Literal["token", "sequence", "constant"] = "constant"


class Dapo(Clipped, frozen=True, tag="dapo"):
    """GRPO with a higher upper clip, token mean, dynamic sampling and overlong shaping."""

    clip_high: NonNegative = 0.28
    overlong: Overlong = Overlong(penalty=1.0)
    dynamic_sampling: bool = True


class Rloo(AlgorithmBase, frozen=True, tag="rloo"):
    """REINFORCE; the baseline of a sample is the mean of the others in its group."""


class ReinforcePp(Clipped, frozen=True, tag="reinforce_pp"):
    """REINFORCE++: advantages normalised over the tokens of the whole step instead of the group; no critic."""

    kl_in_reward = True
    learns_from_equal_rewards = True

    group_baseline: bool = False
    """Subtract the group's mean first, as for hard prompts with several completions each."""

    @property
    def compares_within_group(self) -> bool:
        return self.group_baseline


class Ppo(Clipped, frozen=True, tag="ppo"):
    """PPO with a critic of the policy's size and generalised advantage estimation."""

    kl_in_reward = True
    learns_from_equal_rewards = True

    discount: Fraction = 1.0
    trace: Fraction = 0.95
    """Lambda of the estimation: 1 trusts the rewards, 0 the critic."""
    whiten: bool = True
    """Normalise advantages over the step."""
    critic_lr: AboveZero = 1e-5
    critic_warmup_steps: Natural = 0
    """First steps that train the critic alone."""

    @property
    def compares_within_group(self) -> bool:
        return False

    @property
    def critic_rate(self) -> float:
        return self.critic_lr

    @property
    def policy_from_step(self) -> int:
        return self.critic_warmup_steps

    @property
    def credit(self) -> Credit:
        return Credit(self.discount, self.trace, self.whiten)


class Gspo(Clipped, frozen=True, tag="gspo"):
    """One ratio per completion, the geometric mean of its tokens' ratios. It clips only against the behaviour policy:
    use it with correction=none or a preset that begins with bypass."""

    aggregation: Literal["token", "sequence", "constant"] = "sequence"
    clip_low: Fraction = 3e-4
    clip_high: NonNegative = 4e-4
    normalize_std: bool = True


class Cispo(AlgorithmBase, frozen=True, tag="cispo"):
    """The ratio is a capped weight of the log-probability, so no token loses its gradient. Like gspo, it needs the
    behaviour policy in the ratio."""

    cap: AboveZero = 5.0
    normalize_std: bool = True


class Supervised(AlgorithmBase, frozen=True, tag="sft"):
    """- log pi of every token that the data has for the model's own; rewards count for nothing."""

    learns_from_equal_rewards = True
    needs_advantages = False
    on_data = True

    @property
    def compares_within_group(self) -> bool:
        return False


class CustomAlgorithm(AlgorithmBase, frozen=True, kw_only=True, tag="custom"):
    """A loss of your own, with group-relative advantages or your own."""

    learns_from_equal_rewards = True
    needs_advantages = False

    function: str
    """`package.module:function` or `path/to/file.py:function`: f(tokens: Tokens) -> one loss per sampled token."""
    advantages: str = ""
    """The same: f(rewards of a group: numpy array) -> an advantage for each; empty: group-relative."""
    normalize_std: bool = True
    """Divide group-relative advantages by the group's standard deviation."""

    @property
    def functions(self) -> UserFunctions:
        own = (("algorithm.advantages", self.advantages),) if self.advantages else ()
        return ("algorithm.function", self.function), *own


class Reject(Settings, frozen=True):
    """Samples or tokens outside the bounds are not learned from. rho = pi/mu, and bounds are always those of what
    `measure` names: nothing is inverted."""

    measure: Literal["ratio", "k2", "k3"]
    """rho itself; (log rho)^2 / 2; rho - 1 - log rho."""
    over: Literal["token", "mean", "sum", "max"]
    """Each token alone, or the whole sample by the mean, sum or maximum over its tokens. Of ratios these are the
    geometric mean, the product and the largest."""
    high: AboveZero
    low: NonNegative = 0.0


class CorrectionBase(Chosen, frozen=True):
    """What the rest of the code asks about a correction."""

    @property
    def drift_limit(self) -> float:
        """Drift of a step beyond which its learning rate is lowered; 0: never."""
        return 0.0

    @property
    def normalizes_weights(self) -> bool:
        """Whether weights are divided by their mean over the step."""
        return False

    @property
    def functions(self) -> UserFunctions:
        return ()


class Importance(CorrectionBase, frozen=True, tag="importance"):
    """Importance weights and rejection. The default truncates token weights at 2 and rejects samples by K3; the
    algorithm's clip bounds what a token has moved since the version before, and steps on samples that the policy has
    left far behind are smaller."""

    proximal: Literal["trainer", "behaviour", "interpolated"] = "interpolated"
    """What the algorithm's own ratio is taken against: the trainer's policy before the update, the policy that sampled
    (bypass: then no weight belongs on top), or a policy between the two by the versions of each token."""
    weight: Literal["none", "token", "prefix", "sequence"] = "token"
    """rho of each token, the product over the sample up to each token, or over the whole sample."""
    floor: NonNegative = 0.0
    cap: AboveZero = 2.0
    outside: Literal["truncate", "mask"] = "truncate"
    """A weight beyond floor or cap becomes that bound, or 0."""
    batch_normalize: bool = False
    """Divide the weights by their mean over the step's tokens that are learned from."""
    reject: tuple[Reject, ...] = (Reject(measure="k3", over="mean", high=0.05),)
    max_drift: NonNegative = 0.01
    """Mean (log rho)^2 of a step beyond which its learning rate is lowered, by the root of the excess; never where
    all tokens are of the trainer's own version. 0: never at all."""
    veto: Fraction = 0.0
    """Reject a sample if any token's rho is below this; 0 turns it off."""

    @property
    def drift_limit(self) -> float:
        return self.max_drift

    @property
    def normalizes_weights(self) -> bool:
        return self.batch_normalize


class CustomCorrection(CorrectionBase, frozen=True, tag="custom"):
    """A correction of your own."""

    function: str
    """`package.module:function` or `path/to/file.py:function`: f(log_ratio_L, samples: Samples) -> weight per token."""

    @property
    def functions(self) -> UserFunctions:
        return (("correction.function", self.function),)


Algorithm = Grpo | DrGrpo | Dapo | Rloo | ReinforcePp | Ppo | Gspo | Cispo | Supervised | CustomAlgorithm
Correction = Importance | CustomCorrection
NO_CORRECTION = Importance(proximal="behaviour", weight="none", reject=(), max_drift=0)
"""As `correction=none`."""
