"""Our own engine. `cpu` and `cuda` have one scheduler and model each; rows, sampling and verification are shared."""
