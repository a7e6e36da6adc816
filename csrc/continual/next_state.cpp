// Ownership of a state's tensors, and construction of the next state (next_state.h).
#include "continual/next_state.h"

#include <algorithm>
#include <array>

#include "common/ownership.h"
#include "common/tensor_view.h"

namespace cmab {

namespace {

// The indices of the fields that a step may write to.
std::array<int, 5> written(const Fields& fields) {
  return {fields.queries, fields.keys, fields.values, fields.sums, fields.spare};
}

}  // namespace

bool is_sole_owner(PyObject* state, const Fields& fields) {
  const auto alone = [state](int field) {
    PyObject* const tensor = PyTuple_GET_ITEM(state, field);
    return is_unshared(tensor) && !requires_grad(tensor);
  };
  const std::array<int, 5> all = written(fields);
  return std::all_of(all.begin(), all.end(), alone);
}

void remember(PyObject* state, const Fields& fields) {
  for (const int field : written(fields)) remember(PyTuple_GET_ITEM(state, field));
}

Held::Held(PyObject* state, const Fields& fields) {
  const std::array<int, 5> all = written(fields);
  for (size_t i = 0; i < all.size(); ++i) tensors_[i] = borrowed(PyTuple_GET_ITEM(state, all[i]));
}

py::object NextState::make() {
  py::object made = owned(fields_.type->tp_alloc(fields_.type, fields_.count));
  for (Py_ssize_t i = 0; i < fields_.count; ++i) {
    py::object field = changed_[i] ? std::move(changed_[i]) : field_before(int(i));
    PyTuple_SET_ITEM(made.ptr(), i, field.release().ptr());
  }
  return made;
}

void* NextState::allocate(int field, DType dtype, const cpu::StreamShape& shape, int64_t rows, int64_t columns) {
  void* data;
  py::object made = new_tensor(dtype, {shape.batch, shape.heads, rows, columns}, data);
  remember(made.ptr());
  set(field, std::move(made));
  return data;
}

void NextState::advance_positions(const cpu::Stream& stream) {
  const cpu::StreamShape& shape = stream.shape;
  void* data;
  set(fields_.position, new_tensor(DType::kInt64, {shape.batch, shape.heads}, data));
  for (int64_t head = 0; head < shape.batch * shape.heads; ++head)
    static_cast<int64_t*>(data)[head] = stream.positions[head] + (stream.has_tokens(head) ? shape.tokens : 0);
}

}  // namespace cmab
