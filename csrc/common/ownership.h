// Which tensors' memory may be written again: those that this library made and that nothing else can reach.
//
// A tensor is known from the moment that it was made. Whoever can read its memory then holds the tensor, as a Python
// object or in C++ (autograd's saved tensors, DLPack), or its storage (views, detached tensors, another tensor's data):
// torch counts all three. Of memory that came from elsewhere (NumPy, DLPack, another process) nobody counts the
// readers, so that it is never written.
#pragma once

#include <Python.h>

namespace cmab {

// Remembers a tensor that has just been made, whose memory is its own.
void remember(PyObject* tensor);

// Forgets the tensors that are gone, and returns how many are left.
size_t remembered();

// Whether this tensor was remembered, has that memory still, and is held by one Python reference and nothing else; or
// has no elements.
bool is_unshared(PyObject* tensor);

}  // namespace cmab
