// Reads and makes torch tensors through DLPack's C table, or through Python where there is no table (tensor_view.h).
#include "common/tensor_view.h"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace py = pybind11;

namespace cmab {
namespace {

// ---- the binary interface of DLPack 1 (https://dmlc.github.io/dlpack/latest)

namespace dlpack {

struct Version {
  uint32_t major, minor;
};

struct Tensor {
  void* data;
  int32_t device_type, device_id;
  int32_t dims;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *stride;
  uint64_t byte_offset;
};

struct Managed {
  Version version;
  void* context;
  void (*release)(Managed*);
  uint64_t flags;
  Tensor tensor;
};

struct Table {
  Version version;
  Table* older;
  int (*allocate)(Tensor*, Managed**, void*, void (*)(void*, const char*, const char*));
  int (*share)(void* object, Managed**);
  int (*adopt)(Managed*, void** object);
  int (*look)(void* object, Tensor*);  // borrows: shape and strides stay the object's
  int (*current_stream)(int32_t, int32_t, void**);
};

constexpr int32_t kCpu = 1, kCuda = 2;
constexpr uint8_t kInt = 0, kFloat = 2, kBFloat = 4, kBool = 6;

}  // namespace dlpack

// Python objects of torch, looked up once and never released.
struct Torch {
  PyObject* module = checked(PyImport_ImportModule("torch"));
  PyObject* tensor_type = attribute("Tensor");
  PyObject* empty = attribute("empty");
  PyObject* strided = attribute("strided");
  PyObject* get_num_threads = attribute("get_num_threads");
  // In the order of DType.
  PyObject* dtypes[7] = {attribute("float64"), attribute("float32"), attribute("bfloat16"), attribute("float16"),
                         attribute("bool"),    attribute("int32"),   attribute("int64")};
  PyObject* is_neg = checked(PyObject_GetAttrString(tensor_type, "is_neg"));
  PyObject* requires_grad = checked(PyUnicode_InternFromString("requires_grad"));
  const dlpack::Table* table = find_table();

 private:
  static PyObject* checked(PyObject* object) {
    if (!object) throw py::error_already_set();
    return object;
  }
  PyObject* attribute(const char* name) const { return checked(PyObject_GetAttrString(module, name)); }

  const dlpack::Table* find_table() const {
    const auto capsule =
        py::reinterpret_steal<py::object>(PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__"));
    const auto* found = static_cast<const dlpack::Table*>(
        capsule ? PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api") : nullptr);
    PyErr_Clear();
    for (; found && found->version.major != 1;) found = found->older;
    return found && found->look ? found : nullptr;
  }
};

const Torch& torch() {
  static const Torch* const kept = new Torch;
  return *kept;
}

// ---- through the DLPack table

bool dtype_of(const dlpack::Tensor& seen, DType& dtype) {
  constexpr struct {
    uint8_t code, bits;
    DType dtype;
  } kKnown[] = {{dlpack::kFloat, 32, DType::kFloat32},   {dlpack::kFloat, 64, DType::kFloat64},
                {dlpack::kBFloat, 16, DType::kBFloat16}, {dlpack::kFloat, 16, DType::kFloat16},
                {dlpack::kBool, 8, DType::kBool},        {dlpack::kInt, 32, DType::kInt32},
                {dlpack::kInt, 64, DType::kInt64}};
  for (const auto& known : kKnown)
    if (seen.code == known.code && seen.bits == known.bits && seen.lanes == 1) return dtype = known.dtype, true;
  return false;
}

bool look(const dlpack::Table& table, PyObject* object, TensorView& tensor) {
  dlpack::Tensor seen;
  if (table.look(object, &seen) != 0) {
    PyErr_Clear();
    return false;
  }
  if ((seen.device_type != dlpack::kCpu && seen.device_type != dlpack::kCuda) || seen.dims > kMaxDims ||
      !dtype_of(seen, tensor.dtype))
    return false;
  tensor.device = seen.device_type == dlpack::kCpu ? Device::kCpu : Device::kCuda;
  tensor.device_index = seen.device_id;
  tensor.data = static_cast<char*>(seen.data) + seen.byte_offset;
  tensor.dims = seen.dims;
  std::copy_n(seen.shape, seen.dims, tensor.shape);
  std::copy_n(seen.stride, seen.dims, tensor.stride);
  return true;
}

// A tensor's data and its DLPack descriptor in one allocation, which torch takes over: a step makes one of a few
// hundred bytes.
struct Lent {
  dlpack::Managed managed;
  int64_t shape[kMaxDims], stride[kMaxDims];

  static Lent* make(DType dtype, const int64_t (&sizes)[kMaxDims]) {
    constexpr uintptr_t kAlignment = 64;
    const int64_t element = element_bytes(dtype);
    const size_t bytes = size_t(sizes[0] * sizes[1] * sizes[2] * sizes[3] * element);
    void* memory = std::malloc(sizeof(Lent) + kAlignment + bytes);
    if (!memory) throw std::bad_alloc();
    Lent* made = new (memory) Lent;
    const uintptr_t data = (reinterpret_cast<uintptr_t>(made + 1) + kAlignment - 1) / kAlignment * kAlignment;
    int64_t step = 1;
    for (int i = kMaxDims - 1; i >= 0; --i) made->shape[i] = sizes[i], made->stride[i] = step, step *= sizes[i];
    const uint8_t code = dtype == DType::kBFloat16 ? dlpack::kBFloat : dlpack::kFloat;
    made->managed.version = {1, 0};
    made->managed.context = memory;
    made->managed.release = [](dlpack::Managed* managed) { std::free(managed->context); };
    made->managed.flags = 0;
    made->managed.tensor = {reinterpret_cast<void*>(data),
                            dlpack::kCpu,
                            0,
                            kMaxDims,
                            code,
                            uint8_t(8 * element),
                            1,
                            made->shape,
                            made->stride,
                            0};
    return made;
  }
};

NewTensor lend(const dlpack::Table& table, DType dtype, const int64_t (&shape)[kMaxDims]) {
  Lent* lent = Lent::make(dtype, shape);
  void* data = lent->managed.tensor.data;
  void* object;
  if (table.adopt(&lent->managed, &object) != 0) throw py::error_already_set();
  return {py::reinterpret_steal<py::object>(static_cast<PyObject*>(object)), data};
}

// ---- through Python, where torch has no DLPack table

bool look_slowly(PyObject* object, TensorView& tensor) {
  try {
    const py::handle seen(object);
    const bool on_cpu = py::cast<bool>(seen.attr("is_cpu"));
    if (!(on_cpu || py::cast<bool>(seen.attr("is_cuda"))) || seen.attr("layout").ptr() != torch().strided) return false;
    tensor.device = on_cpu ? Device::kCpu : Device::kCuda;
    tensor.device_index = on_cpu ? 0 : py::cast<int>(seen.attr("get_device")());
    const auto shape = py::cast<py::tuple>(seen.attr("shape")), stride = py::cast<py::tuple>(seen.attr("stride")());
    tensor.dims = int(shape.size());
    if (tensor.dims > kMaxDims) return false;
    for (int i = 0; i < tensor.dims; ++i)
      tensor.shape[i] = py::cast<int64_t>(shape[i]), tensor.stride[i] = py::cast<int64_t>(stride[i]);
    tensor.data = reinterpret_cast<void*>(py::cast<uintptr_t>(seen.attr("data_ptr")()));
    const py::object dtype = seen.attr("dtype");
    const auto* known = std::find(std::begin(torch().dtypes), std::end(torch().dtypes), dtype.ptr());
    tensor.dtype = DType(known - std::begin(torch().dtypes));
    return known != std::end(torch().dtypes);
  } catch (const std::exception&) {
    return false;
  }
}

NewTensor make_slowly(DType dtype, const int64_t (&shape)[kMaxDims]) {
  const py::handle empty(torch().empty), type(torch().dtypes[int(dtype)]);
  NewTensor made{empty(shape[0], shape[1], shape[2], shape[3], py::arg("dtype") = type), nullptr};
  made.data = reinterpret_cast<void*>(py::cast<uintptr_t>(made.object.attr("data_ptr")()));
  return made;
}

}  // namespace

bool TensorView::contiguous() const {
  int64_t step = 1;
  for (int i = dims - 1; i >= 0; --i) {
    if (shape[i] == 0) return true;
    if (shape[i] != 1 && stride[i] != step) return false;
    step *= shape[i];
  }
  return true;
}

bool is_tensor(PyObject* object) {
  return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(torch().tensor_type));
}

bool view(PyObject* tensor, TensorView& view) {
  const dlpack::Table* table = torch().table;
  return table ? look(*table, tensor, view) : look_slowly(tensor, view);
}

bool view_plain(PyObject* object, TensorView& view) {
  const Torch& known = torch();
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != known.tensor_type) return false;
  return (known.table ? look(*known.table, object, view) : look_slowly(object, view)) && view.device == Device::kCpu;
}

bool is_negated(PyObject* tensor) {
  const auto answer = py::reinterpret_steal<py::object>(PyObject_Vectorcall(torch().is_neg, &tensor, 1, nullptr));
  if (!answer) throw py::error_already_set();
  return answer.ptr() == Py_True;
}

bool requires_grad(PyObject* tensor) {
  const auto answer = py::reinterpret_steal<py::object>(PyObject_GetAttr(tensor, torch().requires_grad));
  if (!answer) throw py::error_already_set();
  return answer.ptr() == Py_True;
}

NewTensor new_tensor(DType dtype, int64_t batch, int64_t heads, int64_t rows, int64_t columns) {
  const dlpack::Table* table = torch().table;
  const int64_t shape[kMaxDims] = {batch, heads, rows, columns};
  return table ? lend(*table, dtype, shape) : make_slowly(dtype, shape);
}

py::object new_tensor_like(PyObject* like, DType dtype, int64_t batch, int64_t heads, int64_t rows, int64_t columns) {
  const py::handle type(torch().dtypes[int(dtype)]);
  return py::handle(like).attr("new_empty")(py::make_tuple(batch, heads, rows, columns), py::arg("dtype") = type);
}

py::object empty_like(PyObject* tensor) { return py::handle(torch().module).attr("empty_like")(py::handle(tensor)); }

int torch_threads() { return py::cast<int>(py::handle(torch().get_num_threads)()); }

}  // namespace cmab
