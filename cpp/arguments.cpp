// csrc/common/arguments.h and tensor_view.h for values of torch in place of Python's objects.
#include "common/arguments.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

#include "call.h"
#include "common/bindings.h"

namespace pybind11 {
class object {};  // Arguments has a member that holds copies; there are none here
}  // namespace pybind11

namespace {

c10::IValue nothing;

const c10::IValue& value_of(PyObject* object) { return *reinterpret_cast<const c10::IValue*>(object); }

std::map<std::string, PyObject* (*)(cmab::Arguments&)>& functions() {
  static std::map<std::string, PyObject* (*)(cmab::Arguments&)> all;
  return all;
}

}  // namespace

PyObject* const Py_None = reinterpret_cast<PyObject*>(&nothing);

namespace cmab {

const Device kDevice = Device::kCpu;

int torch_threads() { return at::get_num_threads(); }

void call_unlocked(void (*work)(const void*), const void* given) { work(given); }

void set_constant(PyObject*, const char*, long) {}

void add_function(PyObject*, const char* name, PyObject* (*function)(Arguments&)) { functions()[name] = function; }

bool is_tensor(PyObject* object) { return value_of(object).isTensor(); }

bool is_negated(PyObject* tensor) { return value_of(tensor).toTensor().is_neg(); }

bool view(PyObject* object, TensorView& view) {
  constexpr at::ScalarType kTypes[] = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf,
                                       at::kBool,   at::kInt,   at::kLong};
  const at::Tensor& tensor = value_of(object).toTensor();
  const auto* const type = std::find(std::begin(kTypes), std::end(kTypes), tensor.scalar_type());
  if (tensor.layout() != at::kStrided || !tensor.is_cpu() || tensor.dim() > kMaxDims || type == std::end(kTypes))
    return false;
  view = {tensor.data_ptr(), DType(type - kTypes), Device::kCpu, 0, int(tensor.dim()), {}, {}};
  std::copy_n(tensor.sizes().data(), tensor.dim(), view.shape);
  std::copy_n(tensor.strides().data(), tensor.dim(), view.stride);
  return true;
}

bool TensorView::contiguous() const {
  int64_t step = 1;
  for (int i = dims - 1; i >= 0; --i) {
    if (shape[i] == 0) return true;
    if (shape[i] != 1 && stride[i] != step) return false;
    step *= shape[i];
  }
  return true;
}

// `names` is the address of a vector of names here.
Arguments::Arguments(const char* function, PyObject* const* values, Py_ssize_t positional, PyObject* names)
    : function_(function), values_(values), positional_(positional), names_(names) {}

Arguments::~Arguments() = default;

void Arguments::refuse(const char* name, const std::string& problem) const {
  TORCH_CHECK_VALUE(false, function_, ": `", name, "` ", problem);
}

PyObject* Arguments::argument(const char* name) {
  const auto& names = *reinterpret_cast<const std::vector<const char*>*>(names_);
  for (size_t i = 0; i < names.size(); ++i)
    if (std::strcmp(names[i], name) == 0) return ++read_, values_[i];
  TORCH_CHECK_TYPE(false, function_, ": `", name, "` is missing");
}

TensorView Arguments::read(PyObject* object, const char* name, const char* dims, Types types) {
  const int count = int(std::strlen(dims));
  TensorView view{};
  if (!is_tensor(object) || !cmab::view(object, view) || view.dims != count)
    refuse(name, std::string("is not a dense tensor (") + dims + ") on the CPU");
  if (!types.has(view.dtype) || is_negated(object)) refuse(name, "has a dtype that the kernel does not take");
  for (int i = 0; i < count; ++i) {
    const int letter = dims[i];
    const bool digit = letter >= '0' && letter <= '9';
    if (!digit && !known_[letter]) extents_[letter] = view.shape[i], known_[letter] = true;
    if (view.shape[i] != (digit ? letter - '0' : extents_[letter]))
      refuse(name, "has another size in dimension " + std::to_string(i) + " of (" + dims + ")");
  }
  return view;
}

double Arguments::number(const char* name) { return value_of(argument(name)).toDouble(); }
int64_t Arguments::integer(const char* name) { return value_of(argument(name)).toInt(); }
bool Arguments::flag(const char* name) { return value_of(argument(name)).toBool(); }

void Arguments::check_all_read() const {
  const auto& names = *reinterpret_cast<const std::vector<const char*>*>(names_);
  TORCH_CHECK_TYPE(read_ == Py_ssize_t(names.size()), function_, " was given an argument that it does not have");
}

}  // namespace cmab

namespace cmab::operators {

void find_functions() {
  static std::once_flag once;
  std::call_once(once, [] {
    for (const auto bind : {bind_attention, bind_gram, bind_layers, bind_pinv, bind_prefix, bind_projected, bind_solve})
      bind(nullptr);
  });
}

Call::Call(const c10::FunctionSchema& schema, const std::vector<c10::IValue>& stack) {
  const size_t count = schema.arguments().size();
  for (size_t i = 0; i < count; ++i)
    arguments_.emplace_back(schema.arguments()[i].name(), stack[stack.size() - count + i]);
  taken("impl");  // the kernels here are the only implementation
}

c10::IValue& Call::operator[](const std::string& name) {
  for (auto& [known, value] : arguments_)
    if (known == name) return value;
  return arguments_.emplace_back(name, c10::IValue()).second;
}

c10::IValue Call::taken(const std::string& name) {
  for (auto each = arguments_.begin(); each != arguments_.end(); ++each)
    if (each->first == name) {
      c10::IValue value = std::move(each->second);
      arguments_.erase(each);
      return value;
    }
  TORCH_CHECK(false, name, " is not an argument");
}

void Call::make_contiguous(std::initializer_list<const char*> names) {
  for (const char* name : names)
    if (has(name)) (*this)[name] = tensor(name).contiguous();
}

void Call::join_first_two(std::initializer_list<const char*> names) {
  for (const char* name : names)
    if (has(name)) (*this)[name] = tensor(name).flatten(0, 1);
}

void Call::run(const char* function) {
  std::vector<const char*> names;
  std::vector<PyObject*> values;
  for (auto& [name, value] : arguments_) {
    names.push_back(name.c_str());
    values.push_back(value.isNone() ? Py_None : reinterpret_cast<PyObject*>(&value));
  }
  Arguments in(function, values.data(), 0, reinterpret_cast<PyObject*>(&names));
  functions().at(function)(in);
}

}  // namespace cmab::operators
