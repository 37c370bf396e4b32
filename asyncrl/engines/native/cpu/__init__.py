"""The native engine on CPUs: one flat forward per step over a KV cache of rows; FP8 is simulated in floats."""
