"""The native engine on NVIDIA GPUs: paged KV cache, CUDA graphs, FP8 and speculation."""
