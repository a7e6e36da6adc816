#include "bindings.h"

namespace cmab {

void bind_solve(pybind11::module_&) {}

}  // namespace cmab
