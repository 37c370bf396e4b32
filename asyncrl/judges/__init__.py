"""A language model as scorer, over HTTP."""
