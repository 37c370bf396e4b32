"""What a run leaves behind: metrics, events, progress, summary, comparison and report."""
