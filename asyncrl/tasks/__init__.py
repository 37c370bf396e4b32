"""Tasks: where prompts and their references come from, chosen by name through `registry`."""
