"""A GPU made of software, which runs compiled kernels on the CPU: for the tests, and for those of the benchmarks
(docs/gpu_machine.md)."""
