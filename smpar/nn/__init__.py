"""Tensor parallelism: twins of modules, each rank with its slices."""
