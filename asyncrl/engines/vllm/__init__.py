"""vLLM behind our engine interface: requests, weight updates, speculation, FP8. The only folder that imports vLLM."""
