// Makes the state after a step on the CPU, and decides which memory of the state before the step is reused. For other
// devices, next_state in nystrom/continual/state.py follows the same rule.
//
// A state that is the sole owner of its tensors is stepped in place: new tokens go to free rows of its rings, and its
// sums and spare memory are swapped. Memory that others may read is never written; the step then goes to new memory.
#pragma once

#include <array>
#include <cstdint>

#include "common/dtype.h"
#include "common/python.h"
#include "continual/continual.h"
#include "continual/fields.h"

namespace cmab {

// Whether a step may write to the tensors of a state: this library made them, only the state holds
// them and their memory (common/ownership.h), and none of them requires a gradient.
bool is_sole_owner(PyObject* state, const Fields&);

// Remembers that this library made those tensors of a state to which a step may write.
void remember(PyObject* state, const Fields&);

// References to those tensors of a state to which a step may write. While they are held, nothing else is the sole
// owner.
class Held {
 public:
  Held(PyObject* state, const Fields&);

 private:
  std::array<py::object, 5> tensors_;
};

// Builds the next state; fields that are not set are taken from the state before. The caller must not hold references
// to the state's tensors when it constructs this object: they would count as another owner. From then on, this object
// holds references, so that a second step of the same state, in another thread, writes to other memory.
class NextState {
 public:
  NextState(PyObject* before, const Fields& fields)
      : before_(before), fields_(fields), sole_(is_sole_owner(before, fields)), held_(before, fields) {}

  // Chooses rings with room for the new tokens. Returns true if it allocates new ones; shape.capacity and the pointers
  // then describe the new rings.
  bool choose_rings(cpu::StreamShape& shape, void*& queries, void*& keys, void*& values) {
    if (sole_ && shape.capacity >= shape.window + shape.tokens) return false;
    shape.capacity = shape.window + (shape.tokens < shape.window ? shape.tokens : shape.window);
    queries = allocate(fields_.queries, shape.dtype, shape, shape.capacity, shape.key_width);
    keys = allocate(fields_.keys, shape.dtype, shape, shape.capacity, shape.key_width);
    values = allocate(fields_.values, shape.dtype, shape, shape.capacity, shape.value_width);
    return true;
  }

  // Chooses the memory for `rows` rows of sums, and returns it. The state has `before` rows, and spare memory of the
  // same size.
  void* choose_sums(const cpu::StreamShape& shape, int64_t before, int64_t rows, void* spare) {
    if (rows == 0 && before == 0) return nullptr;
    if (sole_ && rows == before) {
      set(fields_.sums, field_before(fields_.spare));
      set(fields_.spare, field_before(fields_.sums));
      return spare;
    }
    allocate(fields_.spare, state_type(shape.dtype), shape, rows, shape.value_width + kExtraSums);
    return allocate(fields_.sums, state_type(shape.dtype), shape, rows, shape.value_width + kExtraSums);
  }

  // Allocates new landmarks. The landmarks of a state are never written to: several states share them until one
  // landmark is replaced.
  void new_landmarks(const cpu::StreamShape& shape, int64_t landmarks, void*& queries, void*& keys, void*& inverse) {
    const DType dtype = state_type(shape.dtype);
    queries = allocate(fields_.landmark_queries, dtype, shape, landmarks, shape.key_width);
    keys = allocate(fields_.landmark_keys, dtype, shape, landmarks, shape.key_width);
    inverse = allocate(fields_.inverse, dtype, shape, landmarks, landmarks);
  }

  // Sets the positions after the step: those before it, and the number of tokens of each head.
  void advance_positions(const cpu::Stream& stream);

  py::object make();

 private:
  void set(int field, py::object object) { changed_[field] = std::move(object); }
  py::object field_before(int field) const { return borrowed(PyTuple_GET_ITEM(before_, field)); }
  void* allocate(int field, DType dtype, const cpu::StreamShape& shape, int64_t rows, int64_t columns);

  PyObject* const before_;
  const Fields& fields_;
  const bool sole_;
  const Held held_;
  py::object changed_[kMostFields];
};

}  // namespace cmab
