"""The hf backend on CUDA: KV in a pool of positions, custom kernels, CUDA graphs, sampling on the device."""
