#include "bindings.h"

namespace cmab {

void bind_gram(pybind11::module_&) {}

}  // namespace cmab
