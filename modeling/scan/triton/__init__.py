"""The scan as Triton kernels for GPUs."""
