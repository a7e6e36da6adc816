"""A GPU simulated in software, which runs compiled kernels on the CPU, for the tests of the package and of the
benchmarks (docs/gpu_machine.md)."""
