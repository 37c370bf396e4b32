"""How weights travel (shared memory, CUDA IPC, NCCL, files): one file each, chosen by name through `registry`."""
