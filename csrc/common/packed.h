// Sets of rows: one for each batch element, or sets of different sizes packed one after the other into one element.
#pragma once

#include <algorithm>
#include <cstdint>

namespace cmab::cpu {

// `count` rows from `first` on, in batch element `batch`.
struct RowSet {
  int64_t batch, first, count;
};

// The offsets of packed sets, int32 or int64: set s ends where set s + 1 begins. Without data nothing is packed.
struct Offsets {
  const void* data;
  bool wide;  // int64
  int64_t stride;

  int64_t at(int64_t set, int64_t rows) const {
    const int64_t i = set * stride;
    const int64_t offset = wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
    return std::clamp<int64_t>(offset, 0, rows);
  }

  // Set s of an operand with `rows` rows in each batch element.
  RowSet set(int64_t s, int64_t rows) const {
    if (!data) return {s, 0, rows};
    const int64_t first = at(s, rows);
    return {0, first, std::max<int64_t>(at(s + 1, rows) - first, 0)};
  }

  // The number of rows of the largest of `sets` sets.
  int64_t longest(int64_t sets, int64_t rows) const {
    if (!data) return rows;
    int64_t most = 0;
    for (int64_t s = 0; s < sets; ++s) most = std::max(most, set(s, rows).count);
    return most;
  }

  // The number of rows of all sets. Packed sets share one batch element.
  int64_t in_all(int64_t sets, int64_t rows) const { return data ? rows : sets * rows; }
};

}  // namespace cmab::cpu
