"""The drafter: trains draft heads on hidden states of the trainer, and offers better ones to the engines."""
