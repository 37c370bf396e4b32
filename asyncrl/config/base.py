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


class Chosen(Settings, frozen=True, tag_field="type"):
    """Settings of something that is chosen by name, as in `engine=native`.

    Each kind of thing has a base class that lists, as class variables, properties and methods, what the rest of the
    code asks about it. Nobody asks for the type, so that a new one has to be known in its own files only.
    """

    @property
    def kind(self) -> str:
        """The name that it is chosen by."""
        return str(self.__struct_config__.tag)
