"""Ready reward functions: mathematics, and programs that are run in the sandbox."""
