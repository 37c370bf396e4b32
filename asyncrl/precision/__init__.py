"""FP8 rollouts: quantization, KV-cache scales, publication of quantized weights, and checks of the mismatch."""
