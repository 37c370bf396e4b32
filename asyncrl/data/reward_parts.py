"""The named parts of a reward: what they may be, and their text in the trajectory log."""

import math
import re
import sys
from collections.abc import Iterable
from numbers import Real
from typing import Any, cast

import msgspec

NAME = re.compile(r"[a-z0-9_]{1,40}")
"""Small letters only: in SQL, large ones are the same name."""
MOST = 32
Parts = dict[str, float]
_decoder = msgspec.json.Decoder(dict[str, float])


def finite(value: object) -> float | None:
    """As a plain number; None where it is none, or is not finite. Booleans are numbers, numpy's as well."""
    numpy = sys.modules.get("numpy")  # whoever returns one of its booleans has imported it
    if not isinstance(value, Real) and (numpy is None or not isinstance(value, numpy.bool_)):
        return None
    try:
        number = float(cast(Any, value))
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def checked(parts: object) -> Parts | None:
    """As plain numbers in the same order; None where a name or a number is none."""
    if not isinstance(parts, dict) or len(cast(dict[Any, Any], parts)) > MOST:
        return None
    found: Parts = {}
    for name, value in cast(dict[Any, Any], parts).items():
        number = finite(value)
        if number is None or not isinstance(name, str) or not NAME.fullmatch(name):
            return None
        found[name] = number
    return found


def to_text(parts: Parts) -> str:
    """JSON, whose numbers are read back bit for bit."""
    return msgspec.json.encode(parts).decode()


def from_text(text: str) -> Parts:
    """ValueError with what is wrong with it."""
    try:
        found = checked(_decoder.decode(text))
    except msgspec.DecodeError as error:
        raise ValueError(f"parts={text!r:.100}: {error}") from None
    if not found:
        raise ValueError(f"parts={text!r:.100} must be 1 to {MOST} finite numbers under names such as code_style")
    return found


def reward_parts(samples: Iterable[Parts]) -> dict[str, Parts]:
    """The column of a step's metrics: the mean of each part over the samples that have it. No column without parts."""
    values: dict[str, list[float]] = {}
    for parts in samples:
        for name, value in parts.items():
            values.setdefault(name, []).append(value)
    return {"reward_parts": {name: sum(found) / len(found) for name, found in values.items()}} if values else {}
