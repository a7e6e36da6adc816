// Python bindings of the continual steps on the CPU: step(state, query, key, value, retroactive) returns a StepResult.
// For arguments that this fast path does not support, it returns None and has written nothing; the caller then finds
// the reason. The masked steps take a sixth argument, (B,) bool: True where a row of the batch has
// no token. A recorded step returns (result, history, queries, keys, values): the result, and the
// tensors that its gradient reads (StepGradient), or None in place of a tensor that it does not
// read. It takes at most n tokens, so that its new rings also hold the window before the step.
#include <pybind11/critical_section.h>

#include <algorithm>
#include <array>

#include "common/arguments.h"
#include "common/bindings.h"
#include "common/ownership.h"
#include "common/plan.h"
#include "common/tensor_view.h"
#include "continual/call.h"
#include "continual/fields.h"
#include "continual/next_state.h"

using namespace cmab::cpu;

namespace cmab {
namespace {

// The arguments of a step: a state, the new tokens, and a mask or null.
class StepArguments {
 public:
  static constexpr Py_ssize_t kCount = 5;

  StepArguments(PyObject* const* given, PyObject* mask, const Fields& fields)
      : state_(given[0]), tokens_(given + 1), retroactive_(given[4] == Py_True), mask_(mask), fields_(fields) {}

  // Reads the fields that Nyström and exact attention share, except the sums; false if the fast path does not apply.
  bool read(Stream& stream) const {
    if (Py_TYPE(state_) != fields_.type) return false;
    const int names[] = {fields_.queries, fields_.keys, fields_.values};
    TensorView rings[3], tokens[3];
    for (int i = 0; i < 3; ++i)
      if (!view_plain(field(names[i]), rings[i]) || !view_plain(tokens_[i], tokens[i]) || rings[i].dims != 4 ||
          tokens[i].dims != 4)
        return false;
    const TensorView &keys = rings[1], &values = rings[2];
    if (keys.shape[3] > kMostColumns || values.shape[3] > kMostColumns) return false;
    StreamShape& shape = stream.shape;
    shape.dtype = keys.dtype;
    shape.batch = keys.shape[0], shape.heads = keys.shape[1], shape.capacity = keys.shape[2];
    shape.tokens = tokens[1].shape[2];
    shape.key_width = int(keys.shape[3]), shape.value_width = int(values.shape[3]);
    for (int i = 0; i < 3; ++i) {
      const int64_t width = i == 2 ? shape.value_width : shape.key_width;
      if (!rings[i].is(shape.dtype, shape.batch, shape.heads, shape.capacity, width) || !rings[i].contiguous() ||
          !tokens[i].is(shape.dtype, shape.batch, shape.heads, shape.tokens, width))
        return false;
    }
    stream.query = operand(tokens[0]), stream.key = operand(tokens[1]);
    stream.value = operand(tokens[2]);
    stream.queries = rings[0].data, stream.keys = rings[1].data, stream.values = rings[2].data;
    shape.retroactive = retroactive_;
    return count(fields_.window, shape.window) && scale(shape.scale) && shape.window >= 1 &&
           positions(shape, stream.positions) && absent(shape, stream.absent) && shape.capacity > shape.window &&
           shape.tokens >= 1;
  }

  // Reads the number of rows of the sums, their memory, and the spare memory of the same shape; false under the same
  // conditions as read().
  bool read_sums(const StreamShape& shape, int64_t& rows, void*& sums, void*& spare) const {
    TensorView tensor;
    if (!view_plain(field(fields_.sums), tensor) || tensor.dims != 4) return false;
    rows = tensor.shape[2], sums = tensor.data;
    const int64_t columns = shape.value_width + kExtraSums;
    return tensor.is(state_type(shape.dtype), shape.batch, shape.heads, rows, columns) && tensor.contiguous() &&
           matrix(fields_.spare, shape, rows, columns, spare);
  }

  // Reads the memory of field `index`; false unless it is contiguous (batch, heads, rows, columns) of the state's type.
  bool matrix(int index, const StreamShape& shape, int64_t rows, int64_t columns, void*& data) const {
    TensorView tensor;
    if (!view_plain(field(index), tensor)) return false;
    data = tensor.data;
    return tensor.is(state_type(shape.dtype), shape.batch, shape.heads, rows, columns) && tensor.contiguous();
  }

  // Reads an int field of the state; false if it is not one of 64 bits.
  bool count(int index, int64_t& number) const {
    PyObject* object = field(index);
    if (!PyLong_CheckExact(object)) return false;
    number = PyLong_AsLongLong(object);
    if (number != -1 || !PyErr_Occurred()) return true;
    PyErr_Clear();
    return false;
  }

  PyObject* state() const { return state_; }

 private:
  static constexpr int64_t kMostColumns = 1 << 20;

  PyObject* field(int index) const { return PyTuple_GET_ITEM(state_, index); }

  // Reads the position of the stream of each head; false unless every window is full.
  bool positions(const StreamShape& shape, const int64_t*& numbers) const {
    TensorView tensor;
    if (!view_plain(field(fields_.position), tensor) || tensor.dims != 2 || tensor.dtype != DType::kInt64 ||
        tensor.shape[0] != shape.batch || tensor.shape[1] != shape.heads || !tensor.contiguous())
      return false;
    numbers = static_cast<const int64_t*>(tensor.data);
    return std::all_of(numbers, numbers + shape.batch * shape.heads,
                       [&](int64_t number) { return number >= shape.window && number <= kLastPosition; });
  }

  // Reads which rows of the batch have no token; null if there is no mask. A gap is at most as long as a window, so
  // that new rings hold the window of every row.
  bool absent(const StreamShape& shape, const char*& rows) const {
    rows = nullptr;
    if (!mask_) return true;
    TensorView tensor;
    if (!view_plain(mask_, tensor) || tensor.dims != 1 || tensor.dtype != DType::kBool ||
        tensor.shape[0] != shape.batch || !tensor.contiguous() || shape.tokens > shape.window)
      return false;
    rows = static_cast<const char*>(tensor.data);
    return true;
  }

  bool scale(double& number) const {
    TensorView tensor;
    if (!view_plain(field(fields_.scale), tensor) || tensor.dtype != DType::kFloat64 || tensor.dims != 0) return false;
    number = *static_cast<const double*>(tensor.data);
    return true;
  }

  PyObject* const state_;
  PyObject* const* const tokens_;
  const bool retroactive_;
  PyObject* const mask_;
  const Fields& fields_;
};

PyTypeObject* step_result_type() {
  static const py::handle kept =
      py::object(import("cmab_kernels.nystrom.continual.state").attr("StepResult")).release();
  return reinterpret_cast<PyTypeObject*>(kept.ptr());
}

// Creates a StepResult, a NamedTuple, without calling its type, because that call takes 0.1 us more.
PyObject* step_result(py::object out, py::object state) {
  PyTypeObject* type = step_result_type();
  py::object made = owned(type->tp_alloc(type, 2));
  PyTuple_SET_ITEM(made.ptr(), 0, out.release().ptr());
  PyTuple_SET_ITEM(made.ptr(), 1, state.release().ptr());
  return made.release().ptr();
}

// One step: chooses its memory, runs it, and creates its result.
class Step {
 public:
  Step(const StepArguments& arguments, const Fields& fields, const StreamShape& shape, double multiplications)
      : kernel_(continual_kernel(shape.dtype)),
        state_(arguments.state()),
        fields_(fields),
        heavy_(useful_threads(multiplications, 2) > 1),
        threads_(heavy_ ? torch_threads() : 1) {}

  bool finite(const Stream& stream) const {
    if (!heavy_) return cpu::finite(kernel_, stream, threads_);
    const Held held(state_, fields_);
    bool all = false;
    unlocked([&] { all = cpu::finite(kernel_, stream, threads_); });
    return all;
  }

  // Chooses the memory to which the step writes: rings, and `rows` rows of sums if the state has `rows_before`.
  void choose_memory(NextState& next, Stream& stream, int64_t rows_before, int64_t rows, void* spare) {
    const OldRings old{stream.queries, stream.keys, stream.values, stream.shape.capacity};
    if (next.choose_rings(stream.shape, stream.queries, stream.keys, stream.values)) old_rings_ = old;
    stream.new_sums = next.choose_sums(stream.shape, rows_before, rows, spare);
  }

  void choose_landmarks(NextState& next, NystromStream& stream) {
    if (!replaces_landmark(stream)) return;
    old_landmarks_ = {stream.landmark_queries, stream.landmark_keys, stream.inverse};
    next.new_landmarks(stream.shape, stream.landmarks, stream.landmark_queries, stream.landmark_keys, stream.inverse);
  }

  template <class Kind>
  PyObject* result(NextState& next, Kind& stream) {
    const StreamShape& shape = stream.shape;
    const int64_t rows = shape.retroactive ? shape.window : shape.tokens;
    py::object out = new_tensor(shape.dtype, {shape.batch, shape.heads, rows, shape.value_width}, stream.out);
    const auto work = [&] { run(stream); };
    heavy_ ? unlocked(work) : work();
    next.advance_positions(stream);
    return step_result(std::move(out), next.make());
  }

 private:
  void run(const NystromStream& stream) const {
    continual_nystrom(kernel_, stream, old_rings_, old_landmarks_, threads_);
  }
  void run(const AttentionStream& stream) const { continual_attention(kernel_, stream, old_rings_, threads_); }

  const ContinualKernel& kernel_;
  PyObject* const state_;
  const Fields& fields_;
  const bool heavy_;
  const int threads_;
  OldRings old_rings_;
  OldLandmarks old_landmarks_;
};

PyObject* none() { return Py_NewRef(Py_None); }

// A new tensor with `rows` tokens that the gradient of a step reads.
py::object recorded_tokens(const Stream& stream, const void* ring, int width, int64_t rows) {
  void* data;
  py::object made = new_tensor(stream.shape.dtype, {stream.shape.batch, stream.shape.heads, rows, width}, data);
  record_tokens(stream, ring, width, rows, data);
  return made;
}

// The new history of a step with `count` rows of sums.
py::object new_history(Stream& stream, int64_t count) {
  const StreamShape& shape = stream.shape;
  const int64_t columns = history_columns(shape.retroactive, shape.value_width);
  return new_tensor(state_type(shape.dtype), {shape.batch, shape.heads, shape.tokens * count, columns}, stream.history);
}

PyObject* with_record(const Stream& stream, bool whole, const py::object& result, const py::object& history) {
  const StreamShape& shape = stream.shape;
  const int64_t all = shape.window + shape.tokens, rows = whole ? all : 2 * shape.tokens;
  const py::object queries =
      shape.retroactive ? recorded_tokens(stream, stream.queries, shape.key_width, all) : borrowed(Py_None);
  const py::object keys = recorded_tokens(stream, stream.keys, shape.key_width, rows);
  const py::object values = recorded_tokens(stream, stream.values, shape.value_width, rows);
  return PyTuple_Pack(5, result.ptr(), history.ptr(), queries.ptr(), keys.ptr(), values.ptr());
}

PyObject* nystrom_step(PyObject* const* given, PyObject* mask, bool recorded) {
  const Fields& fields = nystrom_fields();
  const StepArguments arguments(given, mask, fields);
  NystromStream stream{};
  const StreamShape& shape = stream.shape;
  int64_t iterations, fixed;
  void *sums, *spare;
  if (!arguments.read(stream) || !arguments.read_sums(shape, stream.landmarks, sums, spare) ||
      !arguments.count(fields.pinv_iterations, iterations) || !arguments.count(fields.fixed, fixed))
    return none();
  const int64_t m = stream.landmarks;
  // 0 iterations mean an exact pseudo-inverse, which torch computes.
  if (m < 1 || m > shape.window || iterations < !fixed || iterations > INT32_MAX) return none();
  if (!arguments.matrix(fields.landmark_queries, shape, m, shape.key_width, stream.landmark_queries) ||
      !arguments.matrix(fields.landmark_keys, shape, m, shape.key_width, stream.landmark_keys) ||
      !arguments.matrix(fields.inverse, shape, m, m, stream.inverse))
    return none();
  stream.sums = sums, stream.iterations = int(iterations), stream.fixed = fixed;
  Step step(arguments, fields, shape, multiplications(stream));
  if (!step.finite(stream)) return none();
  NextState next(arguments.state(), fields);
  step.choose_memory(next, stream, m, m, spare);
  step.choose_landmarks(next, stream);
  if (!recorded) return step.result(next, stream);
  const py::object history = new_history(stream, m);
  const py::object result = owned(step.result(next, stream));
  return with_record(stream, recomputes(stream, m), result, history);
}

PyObject* nystrom_step(PyObject* const* given, PyObject* mask) { return nystrom_step(given, mask, false); }

PyObject* nystrom_recorded_step(PyObject* const* given, PyObject* mask) { return nystrom_step(given, mask, true); }

PyObject* attention_step(PyObject* const* given, PyObject* mask, bool recorded) {
  const Fields& fields = attention_fields();
  const StepArguments arguments(given, mask, fields);
  AttentionStream stream{};
  const StreamShape& shape = stream.shape;
  int64_t rows;
  void *sums, *spare;
  if (!arguments.read(stream) || !arguments.read_sums(shape, rows, sums, spare) || (rows != 0 && rows != shape.window))
    return none();
  if (mask && shape.retroactive && !rows) return none();  // a row without a token would have no sums
  stream.sums = rows ? sums : nullptr;
  Step step(arguments, fields, shape, multiplications(stream));
  if (!step.finite(stream)) return none();
  NextState next(arguments.state(), fields);
  step.choose_memory(next, stream, rows, shape.retroactive ? shape.window : 0, spare);
  const py::object history = recorded && shape.retroactive ? new_history(stream, shape.window) : borrowed(Py_None);
  py::object result = owned(step.result(next, stream));
  return recorded ? with_record(stream, true, result, history) : result.release().ptr();
}

PyObject* attention_step(PyObject* const* given, PyObject* mask) { return attention_step(given, mask, false); }
PyObject* attention_recorded_step(PyObject* const* given, PyObject* mask) { return attention_step(given, mask, true); }

// ---- gradients

// Reads the arguments that both kinds of step have.
void read_gradient(Arguments& in, StepGradient& step) {
  const TensorView query = in.contiguous("query", "BHqD", kWide);
  const DType type = step.dtype = query.dtype;
  step.query = query.data;
  step.keys = in.contiguous("keys", "BHrD", type).data, step.values = in.contiguous("values", "BHrE", type).data;
  step.dout = in.optional_contiguous("dout", "BHoE", type).data;
  step.dnew_queries = in.optional_contiguous("dnew_queries", "BHcD", type).data;
  step.dnew_keys = in.optional_contiguous("dnew_keys", "BHcD", type).data;
  step.dnew_values = in.optional_contiguous("dnew_values", "BHcE", type).data;
  step.positions = static_cast<const int64_t*>(in.contiguous("position", "BH", DType::kInt64).data);
  step.tokens = in.integer("tokens"), step.window = in.integer("window"), step.capacity = in.integer("capacity");
  step.scale = in.number("scale"), step.retroactive = in.flag("retroactive");
  step.batch = in.extent('B'), step.heads = in.extent('H');
  step.query_rows = in.extent('q'), step.rows = in.extent('r');
  step.key_width = int(in.extent('D')), step.value_width = int(in.extent('E'));
  if (step.dnew_queries || step.dnew_keys || step.dnew_values) step.new_capacity = in.extent('c');
  const int64_t all = step.window + step.tokens;
  in.require(step.query_rows == (step.retroactive ? all : step.tokens), "query", "has another length");
  in.require(step.rows == 2 * step.tokens || step.rows == all, "keys", "has another length");
  in.require(!step.dout || in.extent('o') == (step.retroactive ? step.window : step.tokens), "dout",
             "has another length");
}

// Reads the rows of sums, and the history, of a step with `count` rows. A step of exact attention may have had no sums.
void read_sums(Arguments& in, SumsGradient& step, int64_t count) {
  const TensorView sums = in.contiguous("sums", "BHbS", step.dtype);
  const int64_t E = step.value_width, before = in.extent('b');
  step.count = count, step.sums = before ? sums.data : nullptr;
  const TensorView after = in.optional_contiguous("new_sums", "BHaS", step.dtype);
  step.new_sums = after.data;
  step.dnew_sums = in.optional_contiguous("dnew_sums", "BHaS", step.dtype).data;
  step.history = in.contiguous("history", "BHhR", step.dtype).data;
  in.require(before == count || (before == 0 && step.retroactive), "sums", "has another number of rows");
  in.require(in.extent('S') == E + kExtraSums, "sums", "has another number of columns");
  in.require(after.dims ? in.extent('a') == count : !step.retroactive, "new_sums", "has another number of rows");
  in.require(!step.dnew_sums || in.extent('a') == count, "dnew_sums", "has another number of rows");
  in.require(in.extent('h') == step.tokens * count && in.extent('R') == history_columns(step.retroactive, int(E)),
             "history", "has another shape");
}

py::object new_gradient(const StepGradient& step, int64_t rows, int64_t columns, void*& data) {
  return new_tensor(step.dtype, {step.batch, step.heads, rows, columns}, data);
}

// The new gradients of query, key, value and of the three rings.
std::array<py::object, 6> token_gradients(StepGradient& step) {
  const int64_t t = step.tokens, C = step.capacity, D = step.key_width, E = step.value_width;
  const bool reads_ring = step.dnew_queries || step.retroactive;
  return {
      new_gradient(step, t, D, step.dquery), new_gradient(step, t, D, step.dkey),
      new_gradient(step, t, E, step.dvalue), reads_ring ? new_gradient(step, C, D, step.dqueries) : borrowed(Py_None),
      new_gradient(step, C, D, step.dkeys),  new_gradient(step, C, E, step.dvalues)};
}

// Returns the token gradients and those of the sums, both landmarks and the inverse.
PyObject* nystrom_step_backward(Arguments& in) {
  NystromGradient step{};
  read_gradient(in, step);
  const auto read = [&](const char* name, const char* dims) { return in.contiguous(name, dims, step.dtype).data; };
  step.landmark_queries = read("landmark_queries", "BHmD"), step.landmark_keys = read("landmark_keys", "BHmD");
  step.inverse = read("inverse", "BHmm");
  const int64_t D = step.key_width, E = step.value_width, m = in.extent('m');
  read_sums(in, step, m);
  in.require(in.extent('b') == m, "sums", "has another number of rows");
  const std::array<py::object, 6> tokens = token_gradients(step);
  const py::object sums = new_gradient(step, m, E + kExtraSums, step.dsums);
  const py::object queries = new_gradient(step, m, D, step.dlandmark_queries);
  const py::object keys = new_gradient(step, m, D, step.dlandmark_keys);
  const py::object inverse = new_gradient(step, m, m, step.dinverse);
  const double outputs = step.retroactive ? double(step.tokens + step.window) : double(step.tokens);
  const double work = double(step.batch) * step.heads * outputs * m * 6 * (D + E + m);
  const int threads = useful_threads(work, torch_threads());
  in.run([&] { continual_nystrom_backward(step, threads); });
  return PyTuple_Pack(10, tokens[0].ptr(), tokens[1].ptr(), tokens[2].ptr(), tokens[3].ptr(), tokens[4].ptr(),
                      tokens[5].ptr(), sums.ptr(), queries.ptr(), keys.ptr(), inverse.ptr());
}

// Returns the token gradients, and for retroactive outputs that of the sums; None if there were no sums.
PyObject* attention_step_backward(Arguments& in) {
  AttentionGradient step{};
  read_gradient(in, step);
  in.require(step.rows == step.window + step.tokens, "keys", "has another length");
  py::object sums = borrowed(Py_None);
  if (step.retroactive) {
    read_sums(in, step, step.window);
    if (in.extent('b')) sums = new_gradient(step, step.window, step.value_width + kExtraSums, step.dsums);
  }
  const std::array<py::object, 6> tokens = token_gradients(step);
  const double work =
      double(step.batch) * step.heads * step.tokens * step.window * 3 * (step.key_width + step.value_width);
  const int threads = useful_threads(work, torch_threads());
  in.run([&] { continual_attention_backward(step, threads); });
  return PyTuple_Pack(step.retroactive ? 7 : 6, tokens[0].ptr(), tokens[1].ptr(), tokens[2].ptr(), tokens[3].ptr(),
                      tokens[4].ptr(), tokens[5].ptr(), sums.ptr());
}

// If two threads step one state, the second must see which memory the first has taken.
template <PyObject* (*kStep)(PyObject* const*, PyObject*)>
PyObject* call(Arguments& in) {
  PyObject* const* given = in.by_position(StepArguments::kCount, "(state, query, key, value, retroactive) is needed");
  const py::scoped_critical_section alone(given[0]);
  return kStep(given, nullptr);
}

template <PyObject* (*kStep)(PyObject* const*, PyObject*)>
PyObject* call_masked(Arguments& in) {
  constexpr Py_ssize_t kCount = StepArguments::kCount;
  PyObject* const* given = in.by_position(kCount + 1, "(state, query, key, value, retroactive, mask) is needed");
  const py::scoped_critical_section alone(given[0]);
  return kStep(given, given[kCount]);
}

PyObject* owns_alone(Arguments& in) {
  PyObject* const state = in.by_position(1, "(state) is needed")[0];
  return PyBool_FromLong(is_sole_owner(state, fields_of(state)));
}

void remember_state(Arguments& in) {
  PyObject* const state = in.by_position(1, "(state) is needed")[0];
  remember(state, fields_of(state));
}

PyObject* number_remembered(Arguments& in) {
  in.by_position(0, "takes no arguments");
  return PyLong_FromSize_t(remembered());
}

}  // namespace

void bind_continual(PyObject* module) {
  find_fields();
  step_result_type();
  define<call<nystrom_step>>(module, "continual_nystrom_step");
  define<call<attention_step>>(module, "continual_attention_step");
  define<call<nystrom_recorded_step>>(module, "continual_nystrom_recorded_step");
  define<call<attention_recorded_step>>(module, "continual_attention_recorded_step");
  define<nystrom_step_backward>(module, "continual_nystrom_step_backward");
  define<attention_step_backward>(module, "continual_attention_step_backward");
  define<call_masked<nystrom_step>>(module, "continual_nystrom_masked_step");
  define<call_masked<attention_step>>(module, "continual_attention_masked_step");
  define<owns_alone>(module, "is_sole_owner");
  define<remember_state>(module, "remember");
  define<number_remembered>(module, "remembered");
}

}  // namespace cmab
