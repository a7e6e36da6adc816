"""Time, memory, FLOPs and error of the operators, compared with their peers: `python -m cmab_kernels bench
[--quick]`."""
