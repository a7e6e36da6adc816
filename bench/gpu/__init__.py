"""What a GPU shows of the kernels: are they right, do they repeat, and how far are they from the floor. Run by `bench/gpu_check.py`."""
