// The tensors whose memory may be written again: tensors that this library made and that nothing else can reach.
//
// A tensor is recorded when it is created. Any code that can read its memory then holds the tensor,
// as a Python object or in C++ (autograd's saved tensors, DLPack), or holds its storage (views,
// detached tensors, another tensor's data): torch counts all three. For memory that came from
// elsewhere (NumPy, DLPack, another process), nobody counts the readers, so this memory is never
// written.
#pragma once

#include <Python.h>

namespace cmab {

// Remembers a tensor that has just been created with its own memory.
void remember(PyObject* tensor);

// Removes tensors that no longer exist, and returns how many are left.
size_t remembered();

// Whether this tensor was remembered, still has that memory, and is held by one Python reference and nothing else; true
// also for a tensor without elements.
bool is_unshared(PyObject* tensor);

}  // namespace cmab
