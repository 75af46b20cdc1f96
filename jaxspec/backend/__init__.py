"""What differs between CPUs and accelerators: kernels, layouts, compilation."""
