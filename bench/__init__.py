"""Time, memory, FLOPs and error of the operators, beside their peers: `pytest bench [--quick]`."""
