"""Checks of the kernels on a GPU: whether they are right, repeat,
and how far they are from the floor (`bench/gpu_check.py`)."""
