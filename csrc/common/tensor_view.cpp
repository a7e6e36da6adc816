// Reads and creates torch tensors through DLPack's C table, or through Python if there is no table (tensor_view.h).
#include "common/tensor_view.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

#include "common/python.h"

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
  int (*look)(void* object, Tensor*);  // borrowed: shape and strides still belong to the object
  int (*current_stream)(int32_t, int32_t, void**);
};

constexpr int32_t kCpu = 1, kCuda = 2;
constexpr uint8_t kInt = 0, kFloat = 2, kBFloat = 4, kBool = 6;

}  // namespace dlpack

// Python objects of torch, which are looked up once and never released.
struct Torch {
  const py::object module = import("torch");
  const py::object tensor_type = module.attr("Tensor"), empty = module.attr("empty"), strided = module.attr("strided"),
                   get_num_threads = module.attr("get_num_threads"), is_neg = tensor_type.attr("is_neg"),
                   requires_grad = owned(PyUnicode_InternFromString("requires_grad"));
  // In the order of DType.
  const py::object dtypes[7] = {module.attr("float64"), module.attr("float32"), module.attr("bfloat16"),
                                module.attr("float16"), module.attr("bool"),    module.attr("int32"),
                                module.attr("int64")};
  const dlpack::Table* const table = find_table();

 private:
  const dlpack::Table* find_table() const {
    const py::object capsule = py::getattr(tensor_type, "__dlpack_c_exchange_api__", py::none());
    const auto* found = static_cast<const dlpack::Table*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
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

uint8_t code_of(DType dtype) {
  if (dtype == DType::kInt64) return dlpack::kInt;
  return dtype == DType::kBFloat16 ? dlpack::kBFloat : dlpack::kFloat;
}

// A tensor without memory has elements but no address. Some of torch's gradients of zero are such
// tensors.
bool has_memory(const TensorView& tensor) {
  return tensor.data || std::count(tensor.shape, tensor.shape + tensor.dims, 0) > 0;
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
  return has_memory(tensor);
}

// One allocation for a tensor's data and its DLPack descriptor. torch takes ownership of it. A step
// creates such a tensor of a few hundred bytes.
struct Lent {
  dlpack::Managed managed;
  int64_t shape[kMaxDims], stride[kMaxDims];

  static Lent* make(DType dtype, Extents sizes) {
    constexpr uintptr_t kAlignment = 64;
    const int dims = int(sizes.size());
    int64_t elements = 1;
    for (const int64_t size : sizes) elements *= size;
    const int64_t element = element_bytes(dtype);
    const size_t bytes = size_t(elements * element);
    void* memory = std::malloc(sizeof(Lent) + kAlignment + bytes);
    if (!memory) throw std::bad_alloc();
    Lent* made = new (memory) Lent;
    const uintptr_t data = (reinterpret_cast<uintptr_t>(made + 1) + kAlignment - 1) / kAlignment * kAlignment;
    int64_t step = 1;
    for (int i = dims - 1; i >= 0; --i) {
      made->shape[i] = sizes.begin()[i], made->stride[i] = step;
      step *= made->shape[i];
    }
    made->managed.version = {1, 0};
    made->managed.context = memory;
    made->managed.release = [](dlpack::Managed* managed) { std::free(managed->context); };
    made->managed.flags = 0;
    made->managed.tensor = {reinterpret_cast<void*>(data),
                            dlpack::kCpu,
                            0,
                            dims,
                            code_of(dtype),
                            uint8_t(8 * element),
                            1,
                            made->shape,
                            made->stride,
                            0};
    return made;
  }
};

py::object lend(const dlpack::Table& table, DType dtype, Extents shape, void*& data) {
  Lent* lent = Lent::make(dtype, shape);
  data = lent->managed.tensor.data;
  void* object;
  if (table.adopt(&lent->managed, &object) != 0) throw py::error_already_set();
  return owned(static_cast<PyObject*>(object));
}

// ---- through Python, if torch has no DLPack table

py::object call(py::handle function) { return owned(PyObject_CallNoArgs(function.ptr())); }

void* data_of(py::handle tensor) {
  return reinterpret_cast<void*>(uintptr_t(to_integer(call(tensor.attr("data_ptr")).ptr())));
}

bool read_slowly(py::handle object, TensorView& tensor) {
  const bool on_cpu = object.attr("is_cpu").ptr() == Py_True;
  if (!on_cpu && object.attr("is_cuda").ptr() != Py_True) return false;
  if (object.attr("layout").ptr() != torch().strided.ptr()) return false;
  tensor.device = on_cpu ? Device::kCpu : Device::kCuda;
  tensor.device_index = on_cpu ? 0 : int(to_integer(call(object.attr("get_device")).ptr()));
  const py::object shape = object.attr("shape"), stride = call(object.attr("stride")), dtype = object.attr("dtype");
  const Py_ssize_t dims = PyTuple_GET_SIZE(shape.ptr());
  if (dims > kMaxDims) return false;
  tensor.dims = int(dims);
  for (Py_ssize_t i = 0; i < dims; ++i) {
    tensor.shape[i] = to_integer(PyTuple_GET_ITEM(shape.ptr(), i));
    tensor.stride[i] = to_integer(PyTuple_GET_ITEM(stride.ptr(), i));
  }
  tensor.data = data_of(object);
  const auto* known = std::find_if(std::begin(torch().dtypes), std::end(torch().dtypes),
                                   [&](const py::object& one) { return one.is(dtype); });
  tensor.dtype = DType(known - std::begin(torch().dtypes));
  return known != std::end(torch().dtypes) && has_memory(tensor);
}

bool look_slowly(PyObject* object, TensorView& tensor) {
  try {
    return read_slowly(object, tensor);
  } catch (const py::error_already_set&) {
    return false;
  }
}

// torch.empty(shape, dtype=dtype, device="cpu"), because the caller may have another default device.
py::object make_slowly(DType dtype, Extents shape, void*& data) {
  py::tuple sizes(shape.size());
  size_t at = 0;
  for (const int64_t size : shape) sizes[at++] = py::int_(size);
  const py::object given = owned(PyTuple_Pack(1, sizes.ptr()));
  const py::object named =
      owned(Py_BuildValue("{s:O,s:s}", "dtype", torch().dtypes[int(dtype)].ptr(), "device", "cpu"));
  py::object made = owned(PyObject_Call(torch().empty.ptr(), given.ptr(), named.ptr()));
  data = data_of(made);
  return made;
}

// ---- forks

std::atomic<bool> forked{false};
[[maybe_unused]] const int watched = pthread_atfork(nullptr, nullptr, [] { forked = true; });

}  // namespace

bool TensorView::contiguous() const {
  if (std::count(shape, shape + dims, 0)) return true;  // for any strides, because NumPy's are 0
  int64_t step = 1;
  for (int i = dims - 1; i >= 0; --i) {
    if (shape[i] != 1 && stride[i] != step) return false;
    step *= shape[i];
  }
  return true;
}

bool is_tensor(PyObject* object) {
  return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(torch().tensor_type.ptr()));
}

bool view(PyObject* tensor, TensorView& view) {
  const dlpack::Table* table = torch().table;
  return table ? look(*table, tensor, view) : look_slowly(tensor, view);
}

bool view_plain(PyObject* object, TensorView& view) {
  const Torch& known = torch();
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != known.tensor_type.ptr()) return false;
  return (known.table ? look(*known.table, object, view) : look_slowly(object, view)) && view.device == Device::kCpu &&
         !is_negated(object);
}

bool is_negated(PyObject* tensor) { return owned(PyObject_CallOneArg(torch().is_neg.ptr(), tensor)).ptr() == Py_True; }

bool requires_grad(PyObject* tensor) {
  return owned(PyObject_GetAttr(tensor, torch().requires_grad.ptr())).ptr() == Py_True;
}

py::object new_tensor(DType dtype, Extents shape, void*& data) {
  const dlpack::Table* table = torch().table;
  return table ? lend(*table, dtype, shape, data) : make_slowly(dtype, shape, data);
}

int torch_threads() { return forked ? 1 : int(to_integer(call(torch().get_num_threads).ptr())); }

}  // namespace cmab
