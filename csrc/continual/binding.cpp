// The steps of continual attention as Python calls them: step(state, query, key, value, retroactive) gives a
// StepResult, or None, with nothing written, where anything is out of the ordinary; the caller then finds out what.
#include <algorithm>
#include <optional>

#include "common/bindings.h"
#include "common/plan.h"
#include "common/tensor_view.h"
#include "continual/call.h"

namespace py = pybind11;
using namespace cmab::cpu;

namespace cmab {
namespace {

// The fields of both states; see cmab_kernels/nystrom/continual/state.py.
enum Field { kQueries, kKeys, kValues, kSums, kSpare, kOwned };
enum NystromField { kLandmarkQueries = kOwned, kLandmarkKeys, kInverse, kNystromScale, kNystromFields = 13 };
enum AttentionField { kAttentionScale = kOwned, kAttentionFields = 8 };
// From the scale's on.
enum Count { kScale, kPosition, kWindow, kIterations, kFixed };

// Whether nobody but the state holds the tensors that a step writes to, and no graph will read them.
bool is_sole_owner(PyObject* state) {
  for (int i = 0; i < kOwned; ++i)
    if (Py_REFCNT(PyTuple_GET_ITEM(state, i)) != 1) return false;
  for (int i = 0; i < kOwned; ++i)
    if (requires_grad(PyTuple_GET_ITEM(state, i))) return false;
  return true;
}

// A state and the tokens that come to it.
class Arguments {
 public:
  static constexpr Py_ssize_t kCount = 5;

  Arguments(PyObject* const* given, int scale)
      : state_(given[0]), tokens_(given + 1), retroactive_(given[4] == Py_True), scale_(scale) {}

  // A NamedTuple of so many fields.
  bool have(Py_ssize_t fields) const {
    return PyTuple_Check(state_) && !PyTuple_CheckExact(state_) && PyTuple_GET_SIZE(state_) == fields;
  }

  // What is the same for Nyström and exact attention, but for the sums; false where it is out of the ordinary.
  bool read(Stream& stream) const {
    TensorView rings[3], tokens[3];
    for (int i = 0; i < 3; ++i)
      if (!borrow(field(kQueries + i), rings[i]) || !borrow(tokens_[i], tokens[i]) || is_negated(tokens_[i]) ||
          rings[i].dims != 4 || tokens[i].dims != 4)
        return false;
    const TensorView &keys = rings[kKeys], &values = rings[kValues];
    if (keys.shape[3] > kMostColumns || values.shape[3] > kMostColumns) return false;
    StreamShape& shape = stream.shape;
    shape.dtype = keys.dtype;
    shape.batch = keys.shape[0], shape.heads = keys.shape[1], shape.capacity = keys.shape[2];
    shape.tokens = tokens[kKeys].shape[2];
    shape.key_width = int(keys.shape[3]), shape.value_width = int(values.shape[3]);
    for (int i = 0; i < 3; ++i) {
      const int64_t width = i == kValues ? shape.value_width : shape.key_width;
      if (!rings[i].is(shape.dtype, shape.batch, shape.heads, shape.capacity, width) || !rings[i].contiguous() ||
          !tokens[i].is(shape.dtype, shape.batch, shape.heads, shape.tokens, width))
        return false;
    }
    stream.query = operand(tokens[kQueries]), stream.key = operand(tokens[kKeys]);
    stream.value = operand(tokens[kValues]);
    stream.queries = rings[kQueries].data, stream.keys = rings[kKeys].data, stream.values = rings[kValues].data;
    shape.retroactive = retroactive_;
    return count(kPosition, shape.position) && count(kWindow, shape.window) && scale(shape.scale) &&
           shape.window >= 1 && shape.position >= shape.window && shape.capacity > shape.window && shape.tokens >= 1;
  }

  // How many rows the sums have; they and the memory like them.
  bool read_sums(const StreamShape& shape, int64_t& rows, void*& sums, void*& spare) const {
    TensorView tensor;
    if (!borrow(field(kSums), tensor) || tensor.dims != 4) return false;
    rows = tensor.shape[2], sums = tensor.data;
    const int64_t columns = shape.value_width + 3;
    return tensor.is(state_type(shape.dtype), shape.batch, shape.heads, rows, columns) && tensor.contiguous() &&
           matrix(kSpare, shape, rows, columns, spare);
  }

  // Contiguous (batch, heads, rows, columns) of the state's type.
  bool matrix(int index, const StreamShape& shape, int64_t rows, int64_t columns, void*& data) const {
    TensorView tensor;
    if (!borrow(field(index), tensor)) return false;
    data = tensor.data;
    return tensor.is(state_type(shape.dtype), shape.batch, shape.heads, rows, columns) && tensor.contiguous();
  }

  // An int of the state.
  bool count(Count which, int64_t& number) const {
    PyObject* object = field(scale_ + which);
    if (!PyLong_CheckExact(object)) return false;
    number = PyLong_AsLongLong(object);
    if (number != -1 || !PyErr_Occurred()) return true;
    PyErr_Clear();
    return false;
  }

  PyObject* state() const { return state_; }

 private:
  static constexpr int64_t kMostColumns = 1 << 20;

  static Operand operand(const TensorView& tensor) {
    Operand made;
    made.data = tensor.data;
    for (int i = 0; i < 4; ++i) made.stride[i] = tensor.stride[i];
    return made;
  }

  PyObject* field(int index) const { return PyTuple_GET_ITEM(state_, index); }

  bool scale(double& number) const {
    TensorView tensor;
    if (!borrow(field(scale_), tensor) || tensor.dtype != DType::kFloat64 || tensor.dims != 0) return false;
    number = *static_cast<const double*>(tensor.data);
    return true;
  }

  PyObject* const state_;
  PyObject* const* const tokens_;
  const bool retroactive_;
  const int scale_;
};

// A NamedTuple; calling its type takes 0.1 us more.
PyObject* step_result(py::object out, py::object state) {
  static PyObject* const kept =
      py::object(py::module_::import("cmab_kernels.nystrom.continual.state").attr("StepResult")).release().ptr();
  auto* type = reinterpret_cast<PyTypeObject*>(kept);
  PyObject* made = type->tp_alloc(type, 2);
  if (!made) throw py::error_already_set();
  PyTuple_SET_ITEM(made, 0, out.release().ptr());
  PyTuple_SET_ITEM(made, 1, state.release().ptr());
  return made;
}

// The state after a step: fields that are not set are those of the state before.
class NewState {
 public:
  explicit NewState(PyObject* before) : before_(before) {}

  void set(int field, py::object object) { fields_[field] = std::move(object); }
  py::object before(int field) const { return py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(before_, field)); }

  // A new tensor for a field; its memory.
  void* allocate(int field, DType dtype, const StreamShape& shape, int64_t rows, int64_t columns) {
    NewTensor made = new_tensor(dtype, shape.batch, shape.heads, rows, columns);
    fields_[field] = std::move(made.object);
    return made.data;
  }

  py::object make() {
    PyTypeObject* type = Py_TYPE(before_);
    const Py_ssize_t count = PyTuple_GET_SIZE(before_);
    auto made = py::reinterpret_steal<py::object>(type->tp_alloc(type, count));
    if (!made) throw py::error_already_set();
    for (Py_ssize_t i = 0; i < count; ++i)
      PyTuple_SET_ITEM(made.ptr(), i, (fields_[i] ? std::move(fields_[i]) : before(int(i))).release().ptr());
    return made;
  }

 private:
  PyObject* const before_;
  py::object fields_[kNystromFields];
};

// While a step runs without the interpreter's lock, a second one of the same state must see that it is not alone.
class Unlocked {
 public:
  Unlocked(PyObject* state, bool wanted) {
    if (!wanted) return;
    for (int i = 0; i < kOwned; ++i) held_[i] = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(state, i));
    release_.emplace();
  }

 private:
  py::object held_[kOwned];
  std::optional<py::gil_scoped_release> release_;
};

// One step: where it writes, and what it gives.
class Step {
 public:
  Step(const Arguments& arguments, const StreamShape& shape, double multiplications)
      : kernel_(continual_kernel(shape.dtype)),
        state_(arguments.state()),
        new_(state_),
        heavy_(useful_threads(multiplications, 2) > 1),
        threads_(heavy_ ? torch_threads() : 1) {}

  bool finite(const Stream& stream) const {
    const Unlocked unlocked(state_, heavy_);
    return cpu::finite(kernel_, stream, threads_);
  }

  // Rings with room for the new tokens: those of the state if it has it and nobody else reads them.
  void choose_rings(Stream& stream) {
    StreamShape& shape = stream.shape;
    sole_ = is_sole_owner(state_);
    if (sole_ && shape.capacity >= shape.window + shape.tokens) return;
    old_rings_ = {stream.queries, stream.keys, stream.values, shape.capacity};
    shape.capacity = shape.window + std::min(shape.tokens, shape.window);
    const auto ring = [&](int field, int width) {
      return new_.allocate(field, shape.dtype, shape, shape.capacity, width);
    };
    stream.queries = ring(kQueries, shape.key_width);
    stream.keys = ring(kKeys, shape.key_width);
    stream.values = ring(kValues, shape.value_width);
  }

  // The sums change places with the spare, or are written to new memory.
  void choose_sums(Stream& stream, int64_t rows, void* spare) {
    if (sole_ && spare) {
      stream.new_sums = spare;
      new_.set(kSums, new_.before(kSpare));
      new_.set(kSpare, new_.before(kSums));
      return;
    }
    stream.new_sums = allocate_sums(kSums, stream.shape, rows);
    allocate_sums(kSpare, stream.shape, rows);
  }

  // Landmarks of a state are never written to: they are shared until one is replaced.
  void choose_landmarks(NystromStream& stream) {
    if (!replaces_landmark(stream)) return;
    old_landmarks_ = {stream.landmark_queries, stream.landmark_keys, stream.inverse};
    const auto matrix = [&](int field, int64_t columns) {
      return new_.allocate(field, state_type(stream.shape.dtype), stream.shape, stream.landmarks, columns);
    };
    stream.landmark_queries = matrix(kLandmarkQueries, stream.shape.key_width);
    stream.landmark_keys = matrix(kLandmarkKeys, stream.shape.key_width);
    stream.inverse = matrix(kInverse, stream.landmarks);
  }

  void* allocate_sums(int field, const StreamShape& shape, int64_t rows) {
    return new_.allocate(field, state_type(shape.dtype), shape, rows, shape.value_width + 3);
  }

  void run(const NystromStream& stream) {
    const Unlocked unlocked(state_, heavy_);
    continual_nystrom(kernel_, stream, old_rings_, old_landmarks_, threads_);
  }

  void run(const AttentionStream& stream) {
    const Unlocked unlocked(state_, heavy_);
    continual_attention(kernel_, stream, old_rings_, threads_);
  }

  template <class Kind>
  PyObject* result(Kind& stream, int scale) {
    const StreamShape& shape = stream.shape;
    const int64_t rows = shape.retroactive ? shape.window : shape.tokens;
    NewTensor out = new_tensor(shape.dtype, shape.batch, shape.heads, rows, shape.value_width);
    stream.out = out.data;
    run(stream);
    new_.set(scale + kPosition, py::int_(shape.position + shape.tokens));
    return step_result(std::move(out.object), new_.make());
  }

 private:
  const ContinualKernel& kernel_;
  PyObject* const state_;
  NewState new_;
  const bool heavy_;
  const int threads_;
  bool sole_ = false;
  OldRings old_rings_;
  OldLandmarks old_landmarks_;
};

PyObject* none() { return Py_NewRef(Py_None); }

PyObject* nystrom_step(PyObject* const* given) {
  const Arguments arguments(given, kNystromScale);
  NystromStream stream{};
  const StreamShape& shape = stream.shape;
  int64_t iterations, fixed;
  void *sums, *spare;
  if (!arguments.have(kNystromFields) || !arguments.read(stream) ||
      !arguments.read_sums(shape, stream.landmarks, sums, spare) || !arguments.count(kIterations, iterations) ||
      !arguments.count(kFixed, fixed))
    return none();
  const int64_t m = stream.landmarks;
  // The exact pseudo-inverse is torch's.
  if (m < 1 || m > shape.window || iterations < !fixed || iterations > INT32_MAX) return none();
  if (!arguments.matrix(kLandmarkQueries, shape, m, shape.key_width, stream.landmark_queries) ||
      !arguments.matrix(kLandmarkKeys, shape, m, shape.key_width, stream.landmark_keys) ||
      !arguments.matrix(kInverse, shape, m, m, stream.inverse))
    return none();
  stream.sums = sums, stream.iterations = int(iterations), stream.fixed = fixed;
  Step step(arguments, shape, multiplications(stream));
  if (!step.finite(stream)) return none();
  step.choose_rings(stream);
  step.choose_sums(stream, m, spare);
  step.choose_landmarks(stream);
  return step.result(stream, kNystromScale);
}

PyObject* attention_step(PyObject* const* given) {
  const Arguments arguments(given, kAttentionScale);
  AttentionStream stream{};
  const StreamShape& shape = stream.shape;
  int64_t rows;
  void *sums, *spare;
  if (!arguments.have(kAttentionFields) || !arguments.read(stream) || !arguments.read_sums(shape, rows, sums, spare) ||
      (rows != 0 && rows != shape.window))
    return none();
  stream.sums = rows ? sums : nullptr;
  Step step(arguments, shape, multiplications(stream));
  if (!step.finite(stream)) return none();
  step.choose_rings(stream);
  if (shape.retroactive) {
    step.choose_sums(stream, shape.window, rows ? spare : nullptr);
  } else if (rows) {
    step.allocate_sums(kSums, shape, 0);
    step.allocate_sums(kSpare, shape, 0);
  }
  return step.result(stream, kAttentionScale);
}

// A plain C function: pybind11's way of calling takes as long as the step itself.
template <PyObject* (*kStep)(PyObject* const*)>
PyObject* call(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != Arguments::kCount) {
    PyErr_SetString(PyExc_TypeError, "(state, query, key, value, retroactive) is needed");
    return nullptr;
  }
  try {
    return kStep(given);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <PyObject* (*kStep)(PyObject* const*)>
void define(py::module_& module, const char* name) {
  static PyMethodDef definition = {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call<kStep>)),
                                   METH_FASTCALL, nullptr};
  module.attr(name) = py::reinterpret_steal<py::object>(PyCFunction_New(&definition, nullptr));
}

}  // namespace

void bind_continual(py::module_& module) {
  define<nystrom_step>(module, "continual_nystrom_step");
  define<attention_step>(module, "continual_attention_step");
  module.def("is_sole_owner", [](py::handle state) { return is_sole_owner(state.ptr()); });
}

}  // namespace cmab
