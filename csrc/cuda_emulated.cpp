// Runs the CUDA kernels on one CPU thread, for tests: blocks in random order, and the threads of every phase of a block
// in ascending or descending order. Shared memory is filled with NaNs at the start. Tests compile only this file, into
// a module with the functions of cmab_kernels._cuda for tensors on the CPU. The module also has `set_seed`, which
// chooses the orders.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

// Sources are included, so that one compiler call is enough.
#include "common/arguments.cpp"
#include "common/tensor_view.cpp"
#include "continual/cuda_binding.cpp"
#include "continual/fields.cpp"
#include "solve/cuda_binding.cpp"

const cmab::Device cmab::kDevice = cmab::Device::kCpu;

namespace cmab::cuda {
namespace {

int seed = 0;

// Calls `work` for each block of a launch, in random order.
template <class Work>
void play_launch(int64_t blocks, int threads, int shared_bytes, std::mt19937& random, Work work) {
  std::vector<int64_t> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  const std::unique_ptr<char, void (*)(void*)> shared(
      static_cast<char*>(std::aligned_alloc(32, (shared_bytes + 31) / 32 * 32)), std::free);
  for (const int64_t index : order) {
    std::memset(shared.get(), 0xff, shared_bytes);
    work(Block{shared.get(), threads, random() % 2 == 1}, index);
  }
}

template <class T>
void play_solve(const SolveCall& call, std::mt19937& random) {
  const int bytes = SolveBlock<T>::shared_bytes(call.order, call.columns);
  play_launch(call.matrices, solve_threads(call.order), bytes, random, [&](const Block& block, int64_t index) {
    const System<T> own = system<T>(call, index);
    SolveBlock<T>(block, own).solve();
  });
}

template <class Call>
void play_step(const Call& call, int landmarks) {
  std::mt19937 random(seed);
  with_type(call.dtype, [&](auto token) {
    using T = decltype(token);
    const int bytes = step_shared_bytes<T>(call.value_width, landmarks);
    play_launch(call.batch * call.heads, kThreads, bytes, random,
                [&](const Block& block, int64_t head) { step_head<T>(block, call, head); });
  });
}

}  // namespace

void regularised_solve(const SolveCall& call, Stream) {
  std::mt19937 random(seed);
  return call.wide ? play_solve<double>(call, random) : play_solve<float>(call, random);
}

void nystrom_step(const NystromStepCall& call, Stream) { play_step(call, call.landmarks); }

void attention_step(const StepCall& call, Stream) { play_step(call, 0); }

}  // namespace cmab::cuda

using namespace cmab::cuda;
using cmab::Arguments;
using cmab::TensorView;

namespace {

// Writes the iterative pseudo-inverse of one matrix, which a step computes in shared memory, to `inverse`.
template <class S>
void invert(const TensorView& matrix, const TensorView& inverse, int iterations) {
  const int order = int(matrix.shape[0]);
  std::vector<S> memory((4 * order + 2) * order, S(NAN));
  std::copy_n(static_cast<const S*>(matrix.data), order * order, memory.begin());
  const Block block{nullptr, kThreads, seed % 2 == 1};
  const PinvBlock<S> pinv(block, memory.data(), order);
  pinv.invert(iterations);
  for (int i = 0; i < order * order; ++i) static_cast<S*>(inverse.data)[i] = pinv.inverse(i / order, i % order);
}

void iterative_pinv(Arguments& in) {
  const TensorView matrix = in.contiguous("matrix", "MM", cmab::kWide);
  const TensorView inverse = in.contiguous("inverse", "MM", matrix.dtype);
  const int iterations = int(in.integer("iterations"));
  return matrix.dtype == cmab::DType::kFloat64 ? invert<double>(matrix, inverse, iterations)
                                               : invert<float>(matrix, inverse, iterations);
}

}  // namespace

PYBIND11_MODULE(emulated_cuda, module, pybind11::mod_gil_not_used()) {
  module.def("set_seed", [](int number) { seed = number; });
  bind_kernels(module);
  cmab::define<iterative_pinv>(module.ptr(), "iterative_pinv");
}
