"""What an algorithm or a correction can be set to. Class defaults are the vetted setting.

Kept apart from the losses so that reading a config imports no torch.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

Fraction = Annotated[float, Meta(ge=0, le=1)]
NonNegative = Annotated[float, Meta(ge=0)]
AboveZero = Annotated[float, Meta(gt=0)]


class Grpo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="grpo"):
    """Group-relative advantages, clipped ratio, token mean over the whole step."""

    clip_low: Fraction = 0.2
    clip_high: NonNegative = 0.28
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation."""


class NoCorrection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="none"):
    """The ratio is taken against the behaviour policy and clipped; no importance weight on top."""


class TokenTis(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="token_tis"
):
    """Truncated importance sampling: each token weighs min(pi_old / mu, cap)."""

    cap: AboveZero = 2.0


Algorithm = Grpo
Correction = NoCorrection | TokenTis
