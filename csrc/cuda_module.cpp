// cmab_kernels._cuda: the CUDA kernels as Python calls them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "calls.cuh"

namespace py = pybind11;
using namespace cmab::cuda;

PYBIND11_MODULE(_cuda, module) {
  module.attr("MAX_WIDTH") = kMaxWidth;
  module.attr("MAX_LANDMARKS") = kMaxLandmarks;
  module.attr("MAX_VALUE_WIDTH") = kMaxValueWidth;
  module.attr("SHARED_BYTES") = most(most_shared_bytes(), step_shared_bytes<double>(kMaxValueWidth, kMaxLandmarks));
  module.def("shared_memory", shared_memory);
  module.def("ridge_needs", [](int64_t matrices, int64_t keys, int key_width, int value_width, int64_t most) {
    const Needs needed = needs(matrices, keys, key_width, value_width, most);
    return py::make_tuple(needed.together, needed.workspace, needed.tickets);
  });
  module.def("ridge_solve", [](const std::array<int64_t, kRidgeNumbers>& numbers) {
    Numbers in(numbers.data());
    const Stream on = read_stream(in);
    ridge_solve(read_ridge_call(in), on);
  });
  module.def("regularised_solve", [](const std::array<int64_t, kSolveNumbers>& numbers) {
    Numbers in(numbers.data());
    const Stream on = read_stream(in);
    regularised_solve(read_solve_call(in), on);
  });
  module.def("nystrom_step", [](const std::array<int64_t, kNystromStepNumbers>& numbers) {
    Numbers in(numbers.data());
    const Stream on = read_stream(in);
    nystrom_step(read_nystrom_step_call(in), on);
  });
  module.def("attention_step", [](const std::array<int64_t, kAttentionStepNumbers>& numbers) {
    Numbers in(numbers.data());
    const Stream on = read_stream(in);
    attention_step(read_step_call(in), on);
  });
}
