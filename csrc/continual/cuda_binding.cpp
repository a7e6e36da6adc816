// Python bindings of the continual steps on a GPU. A step goes from the state `state` to the state `after`. next_state
// allocates `after`; while a CUDA graph is captured, `after` is the same object as `state`.
#include "common/cuda_bindings.h"
#include "continual/attention_step.cuh"
#include "continual/fields.h"
#include "continual/nystrom_step.cuh"

namespace cmab::cuda {
namespace {

// The state before a step and the one after it.
class States {
 public:
  States(Arguments& in, const Fields& fields)
      : in_(in), fields_(fields), before_(in.object("state")), after_(in.object("after")) {
    for (PyObject* state : {before_, after_})
      in.require(Py_TYPE(state) == fields.type, "state", "does not belong to this kind of step");
  }

  const Fields& fields() const { return fields_; }
  TensorView before(int field, const char* name, const char* dims, Types types) const {
    return contiguous(before_, field, name, dims, types);
  }
  TensorView after(int field, const char* name, const char* dims, Types types) const {
    return contiguous(after_, field, name, dims, types);
  }
  // A field whose shape is the same before and after the step.
  Renewal renewal(int field, const char* name, const char* dims, Types types) const {
    return {before(field, name, dims, types).data, after(field, name, dims, types).data};
  }
  int integer(int field, const char* name) const {
    const int64_t number = PyLong_AsLongLong(PyTuple_GET_ITEM(before_, field));  // -1 if there is none
    in_.require(number >= 0 && number <= INT32_MAX, name, "is not an int of 32 bits");
    return int(number);
  }
  double scale() const {
    TensorView view;
    PyObject* const scale = PyTuple_GET_ITEM(before_, fields_.scale);
    in_.require(is_tensor(scale) && cmab::view(scale, view) && view.dims == 0 && view.device == Device::kCpu &&
                    view.dtype == DType::kFloat64,
                "state.scale", "is not a float64 number on the CPU");
    return *static_cast<const double*>(view.data);
  }

 private:
  TensorView contiguous(PyObject* state, int field, const char* name, const char* dims, Types types) const {
    const TensorView view = in_.read(PyTuple_GET_ITEM(state, field), name, dims, types);
    in_.require(view.contiguous(), name, "is not contiguous");
    return view;
  }

  Arguments& in_;
  const Fields& fields_;
  PyObject *const before_, *const after_;
};

// Reads the arguments that both steps share. Single outputs of exact attention do not update the sums.
template <class Call>
Call read_step(Arguments& in, const States& states) {
  Call call{};
  const Fields& fields = states.fields();
  const TensorView query = in.tensor("query", "BHtD", kFloating), key = in.tensor("key", "BHtD", query.dtype);
  const TensorView value = in.tensor("value", "BHtE", query.dtype);
  call.dtype = query.dtype;
  call.batch = query.shape[0], call.heads = query.shape[1], call.tokens = int(query.shape[2]);
  call.window = states.integer(fields.window, "state.window");
  call.key_width = int(query.shape[3]), call.value_width = int(value.shape[3]);
  in.require(call.value_width <= kMaxValueWidth, "value", "has a width that the kernel does not support");
  in.require(call.tokens >= 1 && call.window >= 1, "key", "has no token, or the window has none");
  call.scale = states.scale();
  call.query = operand(query), call.key = operand(key), call.value = operand(value);

  const auto ring = [&](int field, const char* name, const char* before, const char* after) {
    return Renewal{states.before(field, name, before, query.dtype).data,
                   states.after(field, name, after, query.dtype).data};
  };
  call.queries = ring(fields.queries, "state.queries", "BHCD", "BHcD");
  call.keys = ring(fields.keys, "state.keys", "BHCD", "BHcD");
  call.values = ring(fields.values, "state.values", "BHCE", "BHcE");
  call.capacity_from = int(in.extent('C')), call.capacity_to = int(in.extent('c'));
  in.require(call.capacity_from > call.window && call.capacity_to > call.window, "state.keys", "has no row to spare");

  const DType sums = state_type(query.dtype);
  const TensorView before = states.before(fields.sums, "state.sums", "BHRS", sums);
  const TensorView after = states.after(fields.sums, "after.sums", "BHrS", sums);
  in.require(in.extent('S') == call.value_width + kExtraSums, "state.sums", "does not have E + 5 columns");
  call.sums_known = before.shape[2] > 0;
  call.sums = {call.sums_known ? before.data : after.data, after.data};
  call.position = states.renewal(fields.position, "state.position", "BH", DType::kInt64);

  call.retroactive = in.flag("retroactive");
  const TensorView out = in.contiguous("out", "BHoE", query.dtype);
  in.require(out.shape[2] == (call.retroactive ? call.window : call.tokens), "out", "has a wrong number of rows");
  call.out = out.data;
  return call;
}

void nystrom(Arguments& in) {
  const Fields& fields = nystrom_fields();
  const States states(in, fields);
  auto call = read_step<NystromStepCall>(in, states);
  const DType sums = state_type(call.dtype);
  call.landmarks = int(in.extent('R'));
  in.require(call.landmarks >= 1 && call.landmarks <= kMaxLandmarks && in.extent('r') == in.extent('R'), "state.sums",
             "has a number of landmarks that the kernel does not support");
  call.iterations = states.integer(fields.pinv_iterations, "state.pinv_iterations");
  call.fixed = states.integer(fields.fixed, "state.fixed") != 0;
  call.landmark_queries = states.renewal(fields.landmark_queries, "state.landmark_queries", "BHRD", sums);
  call.landmark_keys = states.renewal(fields.landmark_keys, "state.landmark_keys", "BHRD", sums);
  call.inverse = states.renewal(fields.inverse, "state.inverse", "BHRR", sums);
  const Stream on = read_stream(in);
  in.run([&] { nystrom_step(call, on); });
}

void attention(Arguments& in) {
  const States states(in, attention_fields());
  const auto call = read_step<StepCall>(in, states);
  in.require(
      in.extent('r') == (call.retroactive ? call.window : 0) && (in.extent('R') == 0 || in.extent('R') == call.window),
      "state.sums", "has rows for another kind of output");
  const Stream on = read_stream(in);
  in.run([&] { attention_step(call, on); });
}

}  // namespace

int step_bytes(int value_width, int landmarks, bool wide) {
  return wide ? step_shared_bytes<double>(value_width, landmarks) : step_shared_bytes<float>(value_width, landmarks);
}

void bind_continual(PyObject* module) {
  find_fields();
  set_constant(module, "MAX_LANDMARKS", kMaxLandmarks);
  set_constant(module, "MAX_VALUE_WIDTH", kMaxValueWidth);
  define<nystrom>(module, "nystrom_step");
  define<attention>(module, "attention_step");
}

}  // namespace cmab::cuda
