"""An engine over transformers' own models, for every family that it knows: exact and slow."""
