// Reads and makes torch tensors through DLPack's C table, or through Python where there is no table (tensor_view.h).
#include "common/tensor_view.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

using cmab::python::Object;

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
  static PyObject* checked(PyObject* object) { return Object::owned(object).release(); }
  PyObject* attribute(const char* name) const { return checked(PyObject_GetAttrString(module, name)); }

  const dlpack::Table* find_table() const {
    PyObject* const capsule = PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__");
    const auto* found =
        static_cast<const dlpack::Table*>(capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : nullptr);
    Py_XDECREF(capsule);
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

// A tensor that torch never gave memory to, as its gradients of zero may be, has elements but no address.
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

// A tensor's data and its DLPack descriptor in one allocation, which torch takes over: a step makes one of a few
// hundred bytes.
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

NewTensor lend(const dlpack::Table& table, DType dtype, Extents shape) {
  Lent* lent = Lent::make(dtype, shape);
  void* data = lent->managed.tensor.data;
  void* object;
  if (table.adopt(&lent->managed, &object) != 0) throw python::Raised();
  return {Object::owned(static_cast<PyObject*>(object)), data};
}

// ---- through Python, where torch has no DLPack table

bool truth(PyObject* object, const char* name) { return python::attribute(object, name).get() == Py_True; }

void* data_of(PyObject* tensor) {
  return reinterpret_cast<void*>(uintptr_t(python::to_integer(python::call_method(tensor, "data_ptr").get())));
}

bool read_slowly(PyObject* object, TensorView& tensor) {
  const bool on_cpu = truth(object, "is_cpu");
  if (!on_cpu && !truth(object, "is_cuda")) return false;
  if (python::attribute(object, "layout").get() != torch().strided) return false;
  tensor.device = on_cpu ? Device::kCpu : Device::kCuda;
  tensor.device_index = on_cpu ? 0 : int(python::to_integer(python::call_method(object, "get_device").get()));
  const Object shape = python::attribute(object, "shape"), stride = python::call_method(object, "stride");
  const Py_ssize_t dims = PyTuple_GET_SIZE(shape.get());
  if (dims > kMaxDims) return false;
  tensor.dims = int(dims);
  for (Py_ssize_t i = 0; i < dims; ++i) {
    tensor.shape[i] = python::to_integer(PyTuple_GET_ITEM(shape.get(), i));
    tensor.stride[i] = python::to_integer(PyTuple_GET_ITEM(stride.get(), i));
  }
  tensor.data = data_of(object);
  const Object dtype = python::attribute(object, "dtype");
  const auto* known = std::find(std::begin(torch().dtypes), std::end(torch().dtypes), dtype.get());
  tensor.dtype = DType(known - std::begin(torch().dtypes));
  return known != std::end(torch().dtypes) && has_memory(tensor);
}

bool look_slowly(PyObject* object, TensorView& tensor) {
  try {
    return read_slowly(object, tensor);
  } catch (const python::Raised&) {
    PyErr_Clear();
    return false;
  }
}

// function(shape, dtype=dtype, device="cpu"): the caller's default device may be another.
Object make_tensor(PyObject* function, DType dtype, Extents shape) {
  Object sizes = Object::owned(PyTuple_New(Py_ssize_t(shape.size())));
  Py_ssize_t at = 0;
  for (const int64_t size : shape) PyTuple_SET_ITEM(sizes.get(), at++, python::from_integer(size).release());
  const Object given = Object::owned(PyTuple_Pack(1, sizes.get()));
  const Object named = Object::owned(Py_BuildValue("{s:O,s:s}", "dtype", torch().dtypes[int(dtype)], "device", "cpu"));
  return Object::owned(PyObject_Call(function, given.get(), named.get()));
}

NewTensor make_slowly(DType dtype, Extents shape) {
  NewTensor made{make_tensor(torch().empty, dtype, shape), nullptr};
  made.data = data_of(made.object.get());
  return made;
}

// ---- forks

std::atomic<bool> forked{false};
[[maybe_unused]] const int watched = pthread_atfork(nullptr, nullptr, [] { forked = true; });

}  // namespace

bool TensorView::contiguous() const {
  if (std::count(shape, shape + dims, 0)) return true;  // whatever its strides: NumPy's are 0
  int64_t step = 1;
  for (int i = dims - 1; i >= 0; --i) {
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
  return (known.table ? look(*known.table, object, view) : look_slowly(object, view)) && view.device == Device::kCpu &&
         !is_negated(object);
}

bool is_negated(PyObject* tensor) {
  return Object::owned(PyObject_Vectorcall(torch().is_neg, &tensor, 1, nullptr)).get() == Py_True;
}

bool requires_grad(PyObject* tensor) {
  return Object::owned(PyObject_GetAttr(tensor, torch().requires_grad)).get() == Py_True;
}

NewTensor new_tensor(DType dtype, Extents shape) {
  const dlpack::Table* table = torch().table;
  return table ? lend(*table, dtype, shape) : make_slowly(dtype, shape);
}

int torch_threads() { return forked ? 1 : int(python::to_integer(python::call(torch().get_num_threads).get())); }

}  // namespace cmab
