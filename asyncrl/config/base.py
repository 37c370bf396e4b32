"""What every settings struct is made of: frozen, by keyword, refusing unknown fields; and numbers with their bounds."""

from typing import Annotated

import msgspec
from msgspec import Meta

Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[float, Meta(ge=0)]
AboveZero = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Probability = Annotated[float, Meta(gt=0, le=1)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every settings struct."""
