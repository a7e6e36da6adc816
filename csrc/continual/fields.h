// The indices of the fields in the states of continual attention, NamedTuples of
// cmab_kernels/nystrom/continual/state.py. A field that is not named here is passed on unchanged from state to state.
#pragma once

#include <Python.h>

namespace cmab {

// A state type, its number of fields, and the index of each field by name.
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
// The fields of a state, by its type; raises TypeError for any other object.
const Fields& fields_of(PyObject* state);

// Imports the state types, once, at start-up. A lookup must not cause an import while several threads wait.
void find_fields();

}  // namespace cmab
