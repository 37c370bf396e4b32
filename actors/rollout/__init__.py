"""The rollout actor: one engine, the requests it runs, the delivery of samples, and the quarantine of bad weights."""
