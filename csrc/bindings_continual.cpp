#include "bindings.h"

namespace cmab {

void bind_continual(pybind11::module_&) {}

}  // namespace cmab
