"""Checks of the kernels on a GPU: whether they are right and repeatable, and how far their times are from the floor
(`bench/gpu_check.py`)."""
