"""The waste ledger: what became of every sampled token."""

from collections.abc import Sequence
from typing import Any

from asyncrl.drop_reasons import CALL_CUT_OFF, DropReason, describe
from asyncrl.observe.report.figures import Found
from asyncrl.observe.report.recorded import Row

KEPT = {"trained": "trained on", "training": "in the step being taken", "buffered": "wait in the buffer"}
ORDER = [*KEPT, *(str(reason) for reason in DropReason), CALL_CUT_OFF]
AGAIN_BY_TURNS = """
    SELECT sum(list_sum([place - 1 FOR place IN range(2, len(versions) + 1)
                         IF versions[place] < 0 AND versions[place - 1] >= 0]))
    FROM trajectories
"""
"""A turn ends where a sampled token is followed by a given one."""
ENGINES = 16
"""That are named one by one."""
COLOURS = {"trained": "k-training", "training": "k-sync", "buffered": "k-held"}


def waste(found: Found) -> dict[str, Any]:
    outcomes = found.outcomes
    total = sum(each["tokens"] for each in outcomes.values())
    names = sorted(outcomes, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    rows = [
        {
            "label": KEPT.get(name) or ("" if name == CALL_CUT_OFF else "dropped: ") + describe(name).label,
            "tokens": outcomes[name]["tokens"],
            "share": outcomes[name]["tokens"] / total if total else 0.0,
            "completions": outcomes[name]["completions"],
            "colour": COLOURS.get(name, "k-dropped"),
            "detail": "",
            "meaning": "" if name in KEPT else describe(name).meaning,
        }
        for name in names
    ]
    reasons = [(name, *describe(name)[1:]) for name in names if name not in KEPT]
    return {"rows": rows if total else [], "reasons": reasons, "notes": _notes(found), "useful": useful(found)}


def useful(found: Found) -> float | None:
    """Of the tokens whose end is known, the share that was trained on."""
    trained = found.outcomes.get("trained", {"tokens": 0})["tokens"]
    dropped = sum(each["tokens"] for each in found.outcomes.values() if each["dropped"])
    return trained / (trained + dropped) if trained + dropped else None


def _notes(found: Found) -> list[str]:
    rows = found.run.rows
    notes: list[str] = []
    if (rate := useful(found)) is not None and found.seconds:
        trained = found.outcomes.get("trained", {"tokens": 0})["tokens"]
        notes.append(
            f"{rate:.1%} of the tokens whose end is known were trained on: {trained / found.seconds:,.0f} useful "
            "tokens a second."
        )
    again = sum(row.get("reprefilled_tokens") or 0 for row in rows)
    mode = found.run.setting("rollout.on_update", "keep")
    notes.append(f"{again:,} tokens were prefilled again after weight updates (rollout.on_update={mode}).")
    notes += (prefixes := _prefixes(rows))
    if not prefixes and found.run.setting("environment.function", ""):
        (turns,) = found.run.connection.execute(AGAIN_BY_TURNS).fetchone() or (0,)
        notes.append(
            f"{turns or 0:,} tokens of conversations lay before a later turn, which began as a request of its own: an "
            "engine without a prefix cache has computed them again."
        )
    if moved := sum(row.get("moved") or 0 for row in rows[-1:]):
        notes.append(f"{moved:,} samples went on at another engine because theirs died or was drained.")
    if found.run.attempts > 1:
        notes.append(
            f"The actors were placed {found.run.attempts} times; unfinished completions continued from "
            "their last recorded token."
        )
    return notes


def _prefixes(rows: Sequence[Row]) -> list[str]:
    """Since each engine was started, of those at the end of the last step; nothing of runs of earlier releases."""
    told = rows[-1].get("engines") if rows else None
    if not told or not told.get("cached_tokens"):
        return []
    engines = zip(told["engine"], told["cached_tokens"], told["prefilled_tokens"], strict=True)
    tokens = {name: (cached, cached + computed) for name, cached, computed in engines if cached + computed}
    if not tokens:
        return []
    cached, total = (sum(each) for each in zip(*tokens.values(), strict=True))
    shares = ", ".join(f"{name} {part / whole:.0%}" for name, (part, whole) in list(tokens.items())[:ENGINES])
    return [
        f"{cached / total:.0%} of {total:,} tokens of prompts and earlier turns were found in the engines' caches, and "
        f"not computed again ({shares}{', ...' if len(tokens) > ENGINES else ''})."
    ]
