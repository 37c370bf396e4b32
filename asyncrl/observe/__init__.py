"""What a run shows: reports, queries, traces, `top`, trackers, the audit, the diagnosis of stalls and the doctor."""
