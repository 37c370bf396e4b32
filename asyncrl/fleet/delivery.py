"""How long an engine's finished answers wait for company on their way to the buffer."""

GATHER_SECONDS = 0.05
"""At least."""
LONGEST_SECONDS = 1.0
CALLS_PER_SECOND = 100
"""That the engines of a run make together: one buffer serves them all, and a call costs it more than what is in it."""


def gather_seconds(engines: int) -> float:
    """With many engines the answers of each wait longer, so that the buffer gets as many as before at a time."""
    return min(max(GATHER_SECONDS, engines / CALLS_PER_SECOND), LONGEST_SECONDS)
