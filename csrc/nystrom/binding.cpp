// Python bindings of the m x m part of Nyström attention on the CPU.
#include "common/arguments.h"
#include "common/bindings.h"
#include "nystrom/pinv.h"

using namespace cmab::cpu;

namespace cmab {
namespace {

PinvCall read_matrix(Arguments& in) {
  PinvCall call{};
  const TensorView matrix = in.tensor("matrix", "Mmm", kWide);
  call.dtype = matrix.dtype;
  call.count = matrix.shape[0], call.order = matrix.shape[1];
  call.iterations = int(in.integer("iterations"));
  call.matrix = matrices(matrix);
  return call;
}

void inverse(Arguments& in) {
  PinvCall call = read_matrix(in);
  call.out = in.contiguous("inverse", "Mmm", call.dtype).data;
  const int threads = torch_threads();
  in.run([&] { iterative_pinv(call, threads); });
}

void inverse_backward(Arguments& in) {
  PinvCall call = read_matrix(in);
  call.dinverse = matrices(in.tensor("dinverse", "Mmm", call.dtype));
  call.out = in.contiguous("dmatrix", "Mmm", call.dtype).data;
  const int threads = torch_threads();
  in.run([&] { iterative_pinv_backward(call, threads); });
}

LandmarkCall read_landmarks(Arguments& in) {
  LandmarkCall call{};
  const TensorView query = in.tensor("landmark_query", "MmD", kWide);
  const TensorView key = in.tensor("landmark_key", "MmD", query.dtype);
  const TensorView value = in.tensor("values", "MmE", query.dtype);
  const TensorView absent = in.optional("absent", "Mm", DType::kBool);
  call.dtype = query.dtype;
  call.count = query.shape[0], call.order = query.shape[1];
  call.width = query.shape[2], call.value_width = value.shape[2];
  call.scale = in.number("scale");
  call.iterations = int(in.integer("iterations"));
  call.query = matrices(query), call.key = matrices(key), call.value = matrices(value);
  call.absent = static_cast<const uint8_t*>(absent.data);
  call.absent_stride[0] = absent.stride[0], call.absent_stride[1] = absent.stride[1];
  return call;
}

void values(Arguments& in) {
  LandmarkCall call = read_landmarks(in);
  call.out = in.contiguous("out", "MmE", call.dtype).data;
  const int threads = torch_threads();
  in.run([&] { landmark_values(call, threads); });
}

void values_backward(Arguments& in) {
  LandmarkCall call = read_landmarks(in);
  call.dout = matrices(in.tensor("dout", "MmE", call.dtype));
  call.dquery = in.contiguous("dquery", "MmD", call.dtype).data;
  call.dkey = in.contiguous("dkey", "MmD", call.dtype).data;
  call.dvalue = in.contiguous("dvalues", "MmE", call.dtype).data;
  const int threads = torch_threads();
  in.run([&] { landmark_values_backward(call, threads); });
}

}  // namespace

void bind_pinv(PyObject* module) {
  define<inverse>(module, "iterative_pinv");
  define<inverse_backward>(module, "iterative_pinv_backward");
  define<values>(module, "landmark_values");
  define<values_backward>(module, "landmark_values_backward");
}

}  // namespace cmab
