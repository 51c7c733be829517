"""The hf backend on CUDA: KV in a pool of positions, kernels of our own, CUDA graphs, sampling on the device."""
