"""The report's section about what was asked: how many prompts, how often, and how often they were solved."""

from typing import Any

from asyncrl.observe.report import curves
from asyncrl.observe.report.recorded import Recorded

BY_SOURCE = """
    SELECT source, count(*), count(DISTINCT prompt), avg(rate), avg((rate BETWEEN ? AND ?)::INT)
    FROM asked GROUP BY source ORDER BY source
"""


def prompts(run: Recorded) -> dict[str, Any] | None:
    """None before the first completion."""
    charts = curves.prompts(run)
    if not charts:
        return None
    low, high = run.setting("curriculum.band", None) or (None, None)
    rows = run.connection.execute(curves.ASKED + BY_SOURCE, [low, high]).fetchall()
    head = ["source", "groups", "prompts", "asked again", "mean reward"]
    told = [
        [source, f"{groups:,}", f"{different:,}", f"{1 - different / groups:.0%}", f"{reward:.3f}"]
        + ([f"{inside:.0%}"] if low is not None else [])
        for source, groups, different, reward, inside in rows
    ]
    return {"charts": charts, "head": head + ([f"in [{low:g}, {high:g}]"] if low is not None else []), "rows": told}
