// The table of the tensors that this library made, and torch's counts of who holds one (ownership.h).
#include "common/ownership.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <unordered_map>

#include "common/tensor_view.h"

using cmab::python::Object;

namespace cmab {
namespace {

// Functions of torch that count; null in a torch that has them no more, where no tensor counts as unshared.
struct Counts {
  PyObject* storage_address = function("_storage_address");
  PyObject* storage_uses = function("_storage_Use_Count");
  PyObject* tensor_uses = function("_use_count");

  bool known() const { return storage_address && storage_uses && tensor_uses; }

 private:
  // A function of torch._C, or a method of torch._C.TensorBase, kept for good.
  static PyObject* function(const char* name) {
    const Object module = python::import("torch._C"), tensors = python::attribute(module.get(), "TensorBase");
    PyObject* found = PyObject_GetAttrString(name == std::string("_use_count") ? tensors.get() : module.get(), name);
    PyErr_Clear();
    return found;
  }
};

const Counts& counts() {
  static const Counts* const kept = new Counts;
  return *kept;
}

// Whether function(argument) is 1.
bool is_one(PyObject* function, PyObject* argument) {
  return python::to_integer(Object::owned(PyObject_CallOneArg(function, argument)).get()) == 1;
}

struct Made {
  Object reference;  // weak: it tells whether an object at the tensor's address is still that tensor
  Object storage;    // the address of its storage, which lives as long as the tensor keeps `data`
  const void* data;

  bool is(PyObject* tensor) const {
#if PY_VERSION_HEX >= 0x030d0000
    PyObject* alive = nullptr;
    if (PyWeakref_GetRef(reference.get(), &alive) < 0) PyErr_Clear();
    Py_XDECREF(alive);
    return alive == tensor;
#else
    return PyWeakref_GetObject(reference.get()) == tensor;
#endif
  }
};

using Table = std::unordered_map<PyObject*, Made>;

// Never destroyed: Python may be gone by then.
Table& table() {
  static Table* const kept = new Table;
  return *kept;
}

// Forgets the tensors that are gone, whenever the table has doubled.
void forget_dead(Table& known) {
  static size_t limit = 256;
  if (known.size() < limit) return;
  for (auto entry = known.begin(); entry != known.end();)
    entry = entry->second.is(entry->first) ? std::next(entry) : known.erase(entry);
  limit = 2 * known.size() + 256;
}

}  // namespace

void remember(PyObject* tensor) {
  TensorView seen;
  if (!counts().known() || !view(tensor, seen)) return;
  const python::Section alone(counts().storage_address);
  Table& known = table();
  forget_dead(known);
  known[tensor] = {Object::owned(PyWeakref_NewRef(tensor, nullptr)),
                   Object::owned(PyObject_CallOneArg(counts().storage_address, tensor)), seen.data};
}

bool is_unshared(PyObject* tensor) {
  TensorView seen;
  if (!view(tensor, seen)) return false;
  if (std::count(seen.shape, seen.shape + seen.dims, 0)) return true;
  if (Py_REFCNT(tensor) != 1) return false;
  const python::Section alone(counts().storage_address);
  const Table& known = table();
  const auto entry = known.find(tensor);
  if (entry == known.end() || !entry->second.is(tensor) || seen.data != entry->second.data) return false;
  return is_one(counts().storage_uses, entry->second.storage.get()) && is_one(counts().tensor_uses, tensor);
}

}  // namespace cmab
