"""Why a run makes no progress: what actors report, the snapshot of all, and the sentence that explains it."""
