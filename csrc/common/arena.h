// Arena, which divides up scratch memory.
#pragma once

#include <cstddef>

namespace cmab::cpu {
namespace {

// Hands out 64-byte-aligned buffers from a block of memory; given null, it only counts the bytes needed.
class Arena {
 public:
  explicit Arena(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <class T>
  T* take(size_t elements) {
    char* taken = memory_ ? memory_ + used_ : nullptr;
    used_ += (elements * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(taken);
  }
  size_t used() const { return used_; }

 private:
  char* memory_;
  size_t used_ = 0;
};

}  // namespace
}  // namespace cmab::cpu
