// The table of kernels of the regularised solve for the instruction set for which this file is compiled.
#include "common/instance.h"
#include "solve/lanes.h"
#include "solve/rows.h"

namespace cmab::cpu {
namespace {

template <class T>
struct Solve {
  static size_t lanes_bytes(const Systems& systems) { return LanesSolve<T>(systems, 0, 1, nullptr).bytes(); }
  static void lanes(const Systems& systems, int64_t first, int count, void* scratch) {
    LanesSolve<T>(systems, first, count, scratch).run();
  }
  static size_t rows_bytes(const Systems& systems) { return RowsSolve<T>(systems, 0, nullptr).bytes(); }
  static void rows(const Systems& systems, int64_t matrix, void* scratch) {
    RowsSolve<T>(systems, matrix, scratch).run();
  }
  static constexpr SolveKernel kernel = {kVectorLanes<T>, lanes_bytes, lanes, rows_bytes, rows};
};

}  // namespace

extern const SolveKernels CMAB_TABLE(solve) = {{Solve<double>::kernel, Solve<float>::kernel}};

}  // namespace cmab::cpu
