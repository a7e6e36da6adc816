// Where the fields of the states of continual attention are: as their NamedTuples say, in
// cmab_kernels/nystrom/continual/state.py. A field that is not named here goes on from state to state as it is.
#pragma once

#include <pybind11/pybind11.h>

namespace cmab {

struct Fields {
  explicit Fields(const char* state_type);

  PyTypeObject* type;
  Py_ssize_t count;
  int queries, keys, values, sums, spare;
  int scale, position, window;
  // -1 in states of exact attention.
  int landmark_queries, landmark_keys, inverse, pinv_iterations, fixed;
};

constexpr Py_ssize_t kMostFields = 16;

const Fields& nystrom_fields();
const Fields& attention_fields();
// Those of a state, by its type; raises TypeError where it is none.
const Fields& fields_of(PyObject* state);

// Imports the states, once and for all: what is found out while several threads wait must need no import.
void find_fields();

}  // namespace cmab
