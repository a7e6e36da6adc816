// Finds the fields of the state types by name (fields.h).
#include "continual/fields.h"

#include <stdexcept>
#include <string>

#include "common/python.h"

namespace cmab {
namespace {

const Fields* found_nystrom = nullptr;
const Fields* found_attention = nullptr;

int index_of(PyObject* names, const char* name) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i)
    if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, i), name) == 0) return int(i);
  return -1;
}

}  // namespace

Fields::Fields(const char* state_type) {
  py::object found = import("cmab_kernels.nystrom.continual.state").attr(state_type);
  const py::object names = found.attr("_fields");
  count = PyTuple_GET_SIZE(names.ptr());
  if (count > kMostFields) throw std::length_error("a state of continual attention has more fields than kMostFields");
  const auto at = [&](const char* name) { return index_of(names.ptr(), name); };
  queries = at("queries"), keys = at("keys"), values = at("values"), sums = at("sums"), spare = at("spare");
  scale = at("scale"), position = at("position"), window = at("window");
  landmark_queries = at("landmark_queries"), landmark_keys = at("landmark_keys"), inverse = at("inverse");
  pinv_iterations = at("pinv_iterations"), fixed = at("fixed");
  type = reinterpret_cast<PyTypeObject*>(found.release().ptr());
}

void find_fields() {
  if (found_nystrom) return;
  found_attention = new Fields("ContinualAttentionState");
  found_nystrom = new Fields("ContinualNystromState");
}

const Fields& nystrom_fields() { return *found_nystrom; }
const Fields& attention_fields() { return *found_attention; }

const Fields& fields_of(PyObject* state) {
  for (const Fields* fields : {found_nystrom, found_attention})
    if (Py_TYPE(state) == fields->type) return *fields;
  throw py::type_error(std::string("`state` is a ") + Py_TYPE(state)->tp_name + ", not one of continual attention");
}

}  // namespace cmab
