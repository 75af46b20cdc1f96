"""C++ kernels for CPUs, called by XLA: products with packed weights, attention on the cache, RMSNorm."""
