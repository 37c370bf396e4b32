"""Teachers: models that say of every sampled token how likely they would have chosen it (docs/distillation.md)."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from asyncrl.config.base import AboveZero, Natural, NonNegative, Settings
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config.run import Run


class Teacher(Settings, frozen=True):
    """One model that is learned from."""

    path: str
    """A Hugging Face model directory with the tokenizer of the model that is trained."""
    weight: AboveZero = 1.0
    """Against the other teachers: log-probabilities count by their weighted mean."""
    backend: Literal["auto", "native", "transformers"] = "auto"
    """Whose code computes it, as with `model.backend`."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of its weights and its computation."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is the first GPU where there is one."""

    @property
    def directory(self) -> Path:
        return Path(self.path).expanduser()


class Distillation(Settings, frozen=True):
    """How an advantage is made of what teachers and reward say: of each sampled token it is
    `reward` x that of the reward + `coefficient` x (log p of the teachers - log p of the policy in training).

    With `top_k` the teacher's part is no advantage, but a divergence that is added to the loss of each token."""

    coefficient: AboveZero = 1.0
    """Of the teachers' part."""
    reward: NonNegative = 0.0
    """Of the advantage that the algorithm computes from rewards; 0: rewards are recorded and teach nothing."""
    top_k: Natural = 0
    """Compare policy and teacher over the teacher's so many likeliest tokens and all others together, instead of on the
    sampled token alone; as many as the vocabulary has: over all of it."""
    divergence: Literal["reverse", "forward"] = "reverse"
    """Of `top_k`: KL(policy || teacher), or KL(teacher || policy)."""

    @property
    def token_bytes(self) -> int:
        """Stored of each sampled token: its log-probability, and numbers and log-probabilities of the likeliest."""
        return 4 + (8 * self.top_k + 4 if self.top_k else 0)


def check_distillation(run: "Run") -> None:
    if not run.teachers:
        if run.distill != Distillation():
            raise ConfigError(
                "distill.* is set and teachers is empty: name one, such as teachers=[{path: runs/big/checkpoints/"
                "step-100}], or leave distill.* out"
            )
        return
    if not run.engine.has_model:
        raise ConfigError(
            f"teachers judge tokens of a model, and engine={run.engine.kind} has none; use engine=native or vllm"
        )
    if run.algorithm.dynamic_sampling:
        raise ConfigError(
            "algorithm.dynamic_sampling=true drops groups of equal rewards, from which teachers teach as well as from "
            "others: set algorithm.dynamic_sampling=false"
        )
    if run.distill.top_k and len(run.teachers) > 1:
        raise ConfigError(
            f"distill.top_k={run.distill.top_k} compares with the likeliest tokens of one teacher, and teachers names "
            f"{len(run.teachers)}: keep one of them, or set distill.top_k=0"
        )
    if run.distill.divergence == "forward" and not run.distill.top_k:
        raise ConfigError(
            "distill.divergence=forward needs tokens that the student may not have sampled: set distill.top_k, to 64 "
            "for example, or distill.divergence=reverse"
        )
    if run.learns_from_rewards:
        return
    if run.algorithm.critic_rate is not None:
        raise ConfigError(
            f"algorithm={run.algorithm.kind} trains a critic of rewards, and with distill.reward=0 they teach nothing: "
            "use algorithm=grpo, or set distill.reward above 0"
        )
    if run.algorithm.kl.coefficient and run.algorithm.kl.placement == "reward":
        raise ConfigError(
            "algorithm.kl.placement=reward takes the penalty from rewards, and with distill.reward=0 they teach "
            "nothing: set algorithm.kl.placement=loss, or distill.reward above 0"
        )
