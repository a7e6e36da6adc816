"""Time, memory, FLOPs and error of the operators, beside their peers: `python -m cmab_kernels bench [--quick]`."""
