// The state that a step makes, and which memory of the state before it goes on in: decided here, for every device.
//
// A state whose tensors nobody else holds is stepped where it is: new tokens go to free rows of its rings, and its sums
// and its spare memory change places. What somebody else may read is never written to: the step goes to new memory.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "common/dtype.h"
#include "continual/continual.h"
#include "continual/fields.h"

namespace cmab {

// Whether nobody but the state holds the tensors that a step writes to, and no graph will read them.
bool is_sole_owner(PyObject* state, const Fields&);

// Fields that are not set are those of the state before. Nothing may hold the state's tensors while one is made.
class NextState {
 public:
  // Python's objects for tensors, made with their memory on the CPU, or by torch on the device of the state.
  enum class Memory { kOnCpu, kOfTorch };

  NextState(PyObject* before, const Fields& fields, Memory memory)
      : before_(before), fields_(fields), memory_(memory), sole_(is_sole_owner(before, fields)) {}

  // Rings with room for the new tokens. True if they are new: then they have the capacity, and where they are was set.
  bool choose_rings(cpu::StreamShape& shape, void*& queries, void*& keys, void*& values) {
    if (sole_ && shape.capacity >= shape.window + shape.tokens) return false;
    shape.capacity = shape.window + (shape.tokens < shape.window ? shape.tokens : shape.window);
    queries = allocate(fields_.queries, shape.dtype, shape, shape.capacity, shape.key_width);
    keys = allocate(fields_.keys, shape.dtype, shape, shape.capacity, shape.key_width);
    values = allocate(fields_.values, shape.dtype, shape, shape.capacity, shape.value_width);
    return true;
  }

  // Where a step leaves so many rows of sums, of a state that has `before` rows and spare memory like them.
  void* choose_sums(const cpu::StreamShape& shape, int64_t before, int64_t rows, void* spare) {
    if (rows == 0 && before == 0) return nullptr;
    if (sole_ && rows == before) {
      set(fields_.sums, field_before(fields_.spare));
      set(fields_.spare, field_before(fields_.sums));
      return spare;
    }
    allocate(fields_.spare, state_type(shape.dtype), shape, rows, shape.value_width + 3);
    return allocate(fields_.sums, state_type(shape.dtype), shape, rows, shape.value_width + 3);
  }

  // New landmarks: those of a state are never written to, and shared until one is replaced.
  void new_landmarks(const cpu::StreamShape& shape, int64_t landmarks, void*& queries, void*& keys, void*& inverse) {
    const DType dtype = state_type(shape.dtype);
    queries = allocate(fields_.landmark_queries, dtype, shape, landmarks, shape.key_width);
    keys = allocate(fields_.landmark_keys, dtype, shape, landmarks, shape.key_width);
    inverse = allocate(fields_.inverse, dtype, shape, landmarks, landmarks);
  }

  void set_position(pybind11::object position) { set(fields_.position, std::move(position)); }

  pybind11::object make();

 private:
  void set(int field, pybind11::object object) { changed_[field] = std::move(object); }
  pybind11::object field_before(int field) const {
    return pybind11::reinterpret_borrow<pybind11::object>(PyTuple_GET_ITEM(before_, field));
  }
  void* allocate(int field, DType dtype, const cpu::StreamShape& shape, int64_t rows, int64_t columns);

  PyObject* const before_;
  const Fields& fields_;
  const Memory memory_;
  const bool sole_;
  pybind11::object changed_[kMostFields];
};

}  // namespace cmab
