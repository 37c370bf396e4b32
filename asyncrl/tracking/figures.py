"""A row of metrics.parquet as plain numbers, with the rates that people look for first."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

TIMES = frozenset({"step", "time", "first_work", "first_wave_finished"})
"""Points in time, of which a curve shows nothing."""


def numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Every number in it; lists and what is not known are left out."""
    return dict(_numbers(values, prefix))


def _numbers(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(cast(Mapping[str, Any], value), f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", float(value)


def of_step(row: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, float]:
    """`before` is the row of the step before, if there was one."""
    seconds = row["loop_seconds"] - (before["loop_seconds"] if before else 0.0)
    tokens = row["generated_tokens"] - (before["generated_tokens"] if before else 0)
    figures = numbers({name: value for name, value in row.items() if name not in TIMES})
    if seconds > 0:
        figures |= {
            "step_seconds": seconds,
            "samples_per_second": row["samples"] / seconds,
            "generated_tokens_per_second": tokens / seconds,
            "wait_fraction": row["wait_seconds"] / seconds,
        }
    return figures
