// The driver of the states of all prefixes. A forward task is a block of queries of one head; a backward task is a
// head. Each makes one pass over its keys.
#include <omp.h>

#include <atomic>

#include "attention/plan.h"
#include "common/instruction_sets.h"
#include "prefix/call.h"

namespace cmab::cpu {
namespace {

const PrefixKernels& kernels_of(DType dtype) {
  const int sums = dtype == DType::kFloat64 ? 0 : 1;
#if defined(__x86_64__)
  return widest(prefix_portable[sums], prefix_avx2[sums], prefix_avx512[sums]);
#else
  return prefix_portable[sums];
#endif
}

// Calls work(task, scratch) for each task, on as many threads as are worthwhile.
template <class Work>
void share_out(const PrefixInputs& in, int64_t tasks, size_t scratch_bytes, Work work) {
  const int threads = int(std::min<int64_t>(useful_threads(in.inputs), tasks));
  if (tasks == 0) return;
  Workspace workspace;
  workspace.reserve(threads * align(scratch_bytes));
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t task = 0; task < tasks; ++task) {
    const FlushToZero flush;
    work(task, workspace.at(omp_get_thread_num() * align(scratch_bytes)));
  }
}

Incoming incoming(const PrefixInputs& in, int64_t b, int64_t h) {
  if (!in.state_lse.data) return {};
  const int64_t bytes = element_bytes(state_type(in.inputs.shape.dtype)), *const stride = in.state_out.stride;
  const char* out = static_cast<const char*>(in.state_out.data) + (b * stride[0] + h * stride[1]) * bytes;
  return {{out, stride[2], stride[3]}, in.state_lse.at<double>(b, h, 0), in.state_lse.stride[2]};
}

Decay decay_of(const PrefixInputs& in, int64_t b, int64_t h) {
  return {in.log_decay.data ? in.log_decay.at<double>(b, h, 0) : nullptr, in.log_decay.stride[2]};
}

States states_of(const PrefixInputs& in, int64_t head, void* out, double* lse) {
  const int64_t rows = in.prefixes() * in.inputs.queries, width = in.inputs.shape.value_width;
  const int64_t bytes = element_bytes(state_type(in.inputs.shape.dtype));
  return {static_cast<char*>(out) + head * rows * width * bytes, lse + head * rows};
}

Keys keys_of_head(const Inputs& in, int64_t b, int64_t h) { return keys_of(in, {b, 0, in.keys}, h, 0, in.keys); }

}  // namespace

void prefix_forward(const PrefixInputs& in, void* out, double* lse) {
  const Inputs& inputs = in.inputs;
  const PrefixKernels& kernels = kernels_of(inputs.shape.dtype);
  const int64_t blocks = ceil_div(inputs.queries, kernels.block);
  const int64_t rows = inputs.batch * inputs.heads * in.prefixes() * inputs.queries;
  prefer_huge_pages(out, rows * inputs.shape.value_width * element_bytes(state_type(inputs.shape.dtype)));
  share_out(in, inputs.batch * inputs.heads * blocks, kernels.forward_bytes(inputs.shape),
            [&](int64_t task, void* scratch) {
              const int64_t head = task / blocks, b = head / inputs.heads, h = head % inputs.heads;
              const int64_t first = task % blocks * kernels.block;
              const PrefixForward call{inputs.shape,
                                       inputs.queries,
                                       in.every,
                                       rows_of(inputs, inputs.query, b, h, 0),
                                       keys_of_head(inputs, b, h),
                                       incoming(in, b, h),
                                       decay_of(in, b, h),
                                       states_of(in, head, out, lse)};
              kernels.forward(call, first, int(std::min<int64_t>(kernels.block, inputs.queries - first)), scratch);
            });
}

void prefix_backward(const PrefixInputs& in, const Operand& dout, const Operand& dlse, void* out, double* lse,
                     const PrefixGradients& gradients) {
  const Inputs& inputs = in.inputs;
  const PrefixKernels& kernels = kernels_of(inputs.shape.dtype);
  const int64_t bytes = element_bytes(inputs.shape.dtype), sums = element_bytes(state_type(inputs.shape.dtype));
  const int64_t queries = inputs.queries, d = inputs.shape.key_width, e = inputs.shape.value_width;
  const auto at = [](void* gradient, int64_t offset) {
    return gradient ? static_cast<char*>(gradient) + offset : nullptr;
  };
  share_out(
      in, inputs.batch * inputs.heads, kernels.backward_bytes(inputs.shape, queries), [&](int64_t head, void* scratch) {
        const int64_t b = head / inputs.heads, h = head % inputs.heads;
        const char* slopes = static_cast<const char*>(dout.data) + (b * dout.stride[0] + h * dout.stride[1]) * sums;
        const PrefixBackward call{
            inputs.shape,
            queries,
            in.every,
            rows_of(inputs, inputs.query, b, h, 0),
            keys_of_head(inputs, b, h),
            incoming(in, b, h),
            decay_of(in, b, h),
            states_of(in, head, out, lse),
            {slopes, dout.stride[2], dout.stride[3]},
            dlse.at<double>(b, h, 0),
            dlse.stride[2],
            at(gradients.query, head * queries * d * bytes),
            {at(gradients.key, head * inputs.keys * d * bytes), at(gradients.value, head * inputs.keys * e * bytes),
             inputs.shape.dtype, at(gradients.key_bias, head * inputs.keys * sums)},
            at(gradients.state_out, head * queries * e * sums),
            gradients.state_lse ? gradients.state_lse + head * queries : nullptr,
            gradients.log_decay ? gradients.log_decay + head * in.prefixes() : nullptr};
        kernels.backward(call, scratch);
      });
}

}  // namespace cmab::cpu
