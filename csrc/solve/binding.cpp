// Python binding of the batched regularised solve on the CPU.
#include "common/arguments.h"
#include "common/bindings.h"
#include "solve/solve.h"

using namespace cmab::cpu;

namespace cmab {
namespace {

void solve(Arguments& in) {
  const TensorView gram = in.tensor("gram", "MDD", kWide), rhs = in.tensor("rhs", "MDE", gram.dtype);
  const TensorView alpha = in.tensor("alpha", "M", gram.dtype);
  Systems systems{};
  systems.count = rhs.shape[0], systems.order = rhs.shape[1], systems.columns = rhs.shape[2];
  systems.gram = matrices(gram), systems.rhs = matrices(rhs);
  systems.alpha = alpha.data, systems.alpha_stride = alpha.stride[0];
  systems.weight = in.contiguous("weight", "MDE", gram.dtype).data;
  systems.info = static_cast<int32_t*>(in.contiguous("info", "M", DType::kInt32).data);
  const int threads = torch_threads();
  in.run([&] { regularised_solve(gram.dtype, systems, threads); });
}

}  // namespace

void bind_solve(PyObject* module) { define<solve>(module, "regularised_solve"); }

}  // namespace cmab
