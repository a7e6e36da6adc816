// The table of the tensors that this library made, and torch's counts of the references to a tensor (ownership.h).
#include "common/ownership.h"

#include <pybind11/critical_section.h>

#include <algorithm>
#include <iterator>
#include <unordered_map>

#include "common/python.h"
#include "common/tensor_view.h"

namespace cmab {
namespace {

// torch's functions that count references. They are None if torch no longer has them; then no tensor counts as
// unshared.
struct Counts {
  const py::object module = import("torch._C");
  const py::object storage_address = py::getattr(module, "_storage_address", py::none());
  const py::object storage_uses = py::getattr(module, "_storage_Use_Count", py::none());
  const py::object tensor_uses = py::getattr(module.attr("TensorBase"), "_use_count", py::none());

  bool known() const { return !storage_address.is_none() && !storage_uses.is_none() && !tensor_uses.is_none(); }
};

const Counts& counts() {
  static const Counts* const kept = new Counts;
  return *kept;
}

// Whether function(argument) is 1.
bool is_one(const py::object& function, PyObject* argument) {
  return to_integer(owned(PyObject_CallOneArg(function.ptr(), argument)).ptr()) == 1;
}

struct Made {
  py::weakref reference;  // shows whether an object at the tensor's address is still that tensor
  py::object storage;     // the address of the tensor's storage, which lives as long as the tensor keeps `data`
  const void* data;

  bool is(PyObject* tensor) const {
#if PY_VERSION_HEX >= 0x030d0000
    PyObject* alive = nullptr;
    if (PyWeakref_GetRef(reference.ptr(), &alive) < 0) PyErr_Clear();
    Py_XDECREF(alive);
    return alive == tensor;
#else
    return PyWeakref_GetObject(reference.ptr()) == tensor;
#endif
  }
};

using Table = std::unordered_map<PyObject*, Made>;

// Never destroyed, because Python may already have ended at that time.
Table& table() {
  static Table* const kept = new Table;
  return *kept;
}

void forget_dead(Table& known) {
  for (auto entry = known.begin(); entry != known.end();)
    entry = entry->second.is(entry->first) ? std::next(entry) : known.erase(entry);
}

// Removes tensors that no longer exist, whenever the size of the table has doubled.
void bound(Table& known) {
  static size_t limit = 256;
  if (known.size() < limit) return;
  forget_dead(known);
  limit = 2 * known.size() + 256;
}

}  // namespace

void remember(PyObject* tensor) {
  TensorView seen;
  if (!counts().known() || !view(tensor, seen)) return;
  const py::scoped_critical_section alone(counts().storage_address);
  Table& known = table();
  bound(known);
  known[tensor] = {py::weakref(tensor), owned(PyObject_CallOneArg(counts().storage_address.ptr(), tensor)), seen.data};
}

size_t remembered() {
  const py::scoped_critical_section alone(counts().storage_address);
  forget_dead(table());
  return table().size();
}

bool is_unshared(PyObject* tensor) {
  TensorView seen;
  if (!view(tensor, seen)) return false;
  if (std::count(seen.shape, seen.shape + seen.dims, 0)) return true;
  if (Py_REFCNT(tensor) != 1) return false;
  const py::scoped_critical_section alone(counts().storage_address);
  const Table& known = table();
  const auto entry = known.find(tensor);
  if (entry == known.end() || !entry->second.is(tensor) || seen.data != entry->second.data) return false;
  return is_one(counts().storage_uses, entry->second.storage.ptr()) && is_one(counts().tensor_uses, tensor);
}

}  // namespace cmab
