// Ownership of a state's tensors, and construction of the next state (next_state.h).
#include "continual/next_state.h"

#include "common/tensor_view.h"

namespace cmab {

bool is_sole_owner(PyObject* state, const Fields& fields) {
  const int written[] = {fields.queries, fields.keys, fields.values, fields.sums, fields.spare};
  for (const int field : written)
    if (Py_REFCNT(PyTuple_GET_ITEM(state, field)) != 1) return false;
  for (const int field : written)
    if (requires_grad(PyTuple_GET_ITEM(state, field))) return false;
  return true;
}

python::Object NextState::make() {
  auto made = python::Object::owned(fields_.type->tp_alloc(fields_.type, fields_.count));
  for (Py_ssize_t i = 0; i < fields_.count; ++i) {
    python::Object field = changed_[i] ? std::move(changed_[i]) : field_before(int(i));
    PyTuple_SET_ITEM(made.get(), i, field.release());
  }
  return made;
}

void* NextState::allocate(int field, DType dtype, const cpu::StreamShape& shape, int64_t rows, int64_t columns) {
  if (memory_ == Memory::kOfTorch) {
    set(field,
        new_tensor_like(PyTuple_GET_ITEM(before_, fields_.keys), dtype, shape.batch, shape.heads, rows, columns));
    return nullptr;
  }
  NewTensor made = new_tensor(dtype, shape.batch, shape.heads, rows, columns);
  set(field, std::move(made.object));
  return made.data;
}

}  // namespace cmab
