"""The kernels of the CUDA engine in Triton, and the same functions in torch for tests (`choice` picks)."""
