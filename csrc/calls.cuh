// What Python calls: kernels on a GPU, or what plays them. A call comes as numbers, one after the other: extents,
// addresses and strides (in elements) in the order in which they are read here.
#pragma once

#include "continual/attention_step.cuh"
#include "continual/nystrom_step.cuh"
#include "gram/ridge_solve.cuh"
#include "solve/regularised_solve.cuh"

namespace cmab::cuda {

constexpr int kRidgeNumbers = 32, kSolveNumbers = 17, kAttentionStepNumbers = 40, kNystromStepNumbers = 49;

// Where a call is to run: a device, and one of its streams (a cudaStream_t).
struct Stream {
  int device;
  uintptr_t stream;
};

// Asynchronous, and without an allocation.
void ridge_solve(const RidgeCall& call, Stream on);
void regularised_solve(const SolveCall& call, Stream on);
void nystrom_step(const NystromStepCall& call, Stream on);
void attention_step(const StepCall& call, Stream on);

// What a block may have on this GPU, in bytes.
int shared_memory(int device);

class Numbers {
 public:
  explicit Numbers(const int64_t* numbers) : next_(numbers) {}
  int64_t number() { return *next_++; }
  template <class T>
  T* address() {
    return reinterpret_cast<T*>(number());
  }
  void strides(int64_t* to, int count) {
    for (int i = 0; i < count; ++i) to[i] = number();
  }

 private:
  const int64_t* next_;
};

inline Stream read_stream(Numbers& in) {
  Stream on;
  on.device = int(in.number());
  on.stream = uintptr_t(in.number());
  return on;
}

inline Operand read_operand(Numbers& in) {
  Operand operand;
  operand.data = in.address<const void>();
  in.strides(operand.stride, 4);
  return operand;
}

inline RidgeCall read_ridge_call(Numbers& in) {
  RidgeCall call;
  call.dtype = DType(in.number());
  call.batch = in.number();
  call.heads = in.number();
  call.keys = in.number();
  call.together = in.number();
  call.key_width = int(in.number());
  call.value_width = int(in.number());
  call.key = read_operand(in);
  call.value = read_operand(in);
  call.weights = in.address<const void>();
  in.strides(call.weights_stride, 3);
  call.absent = in.address<const uint8_t>();
  in.strides(call.absent_stride, 2);
  call.alpha = in.address<const double>();
  call.weight = in.address<double>();
  call.gram = in.address<double>();
  call.info = in.address<int32_t>();
  call.workspace = in.address<double>();
  call.tickets = in.address<unsigned>();
  return call;
}

inline SolveCall read_solve_call(Numbers& in) {
  SolveCall call;
  call.wide = in.number();
  call.matrices = in.number();
  call.order = int(in.number());
  call.columns = int(in.number());
  call.gram = in.address<const void>();
  in.strides(call.gram_stride, 3);
  call.rhs = in.address<const void>();
  in.strides(call.rhs_stride, 3);
  call.alpha = in.address<const void>();
  call.weight = in.address<void>();
  call.info = in.address<int32_t>();
  return call;
}

inline Renewal read_renewal(Numbers& in) {
  Renewal renewal;
  renewal.from = in.address<const void>();
  renewal.to = in.address<void>();
  return renewal;
}

inline StepCall read_step_call(Numbers& in) {
  StepCall call;
  call.dtype = DType(in.number());
  call.batch = in.number();
  call.heads = in.number();
  call.tokens = int(in.number());
  call.window = int(in.number());
  call.key_width = int(in.number());
  call.value_width = int(in.number());
  call.retroactive = in.number();
  call.scale = *in.address<const double>();  // on the CPU
  call.query = read_operand(in);
  call.key = read_operand(in);
  call.value = read_operand(in);
  call.capacity_from = int(in.number());
  call.capacity_to = int(in.number());
  call.queries = read_renewal(in);
  call.keys = read_renewal(in);
  call.values = read_renewal(in);
  call.sums = read_renewal(in);
  call.position = read_renewal(in);
  call.out = in.address<void>();
  call.sums_known = in.number();
  return call;
}

inline NystromStepCall read_nystrom_step_call(Numbers& in) {
  NystromStepCall call;
  static_cast<StepCall&>(call) = read_step_call(in);
  call.landmarks = int(in.number());
  call.iterations = int(in.number());
  call.fixed = in.number();
  call.landmark_queries = read_renewal(in);
  call.landmark_keys = read_renewal(in);
  call.inverse = read_renewal(in);
  return call;
}

}  // namespace cmab::cuda
