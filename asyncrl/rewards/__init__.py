"""Ready reward functions: mathematics, programs that are run in the sandbox, and a reward model."""
