// The operators of exported programs as a library without Python: the schemas of cmab_kernels, and
// the work that its modules `native` do before they call csrc.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

#include "call.h"
#include "common/plan.h"
#include "continual/call.h"

namespace cmab::operators {
namespace {

at::ScalarType sums_of(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor empty(const at::Tensor& like, at::IntArrayRef shape, at::ScalarType type) {
  return at::empty(shape, like.options().dtype(type));
}

Tensors attention(Call& in) {
  const at::Tensor query = in.tensor("query");
  std::vector<int64_t> shape = query.sizes().vec();
  const at::Tensor lse = empty(query, {shape[0], shape[1], shape[2]}, at::kDouble);
  shape[3] = in.tensor("value").size(3);
  const at::Tensor out = empty(query, shape, sums_of(query));
  in.make_contiguous({"cu_seqlens"});
  in["out"] = out, in["lse"] = lse, in["reliable"] = c10::IValue();
  in.run("attention_forward");
  return {out, lse};
}

Tensors projected_attention(Call& in) {
  const at::Tensor query = in.tensor("query");  // (K, B, H, L, D)
  std::vector<int64_t> shape = query.sizes().vec();
  const at::Tensor lse = empty(query, {shape[0], shape[1], shape[2], shape[3]}, at::kDouble);
  shape[4] = in.tensor("weight").size(1) / shape[2] - shape[4];
  const at::Tensor out = empty(query, shape, query.scalar_type());
  in.make_contiguous({"cu_seqlens", "weight", "bias"});
  in["normed"] = in.has("eps");
  if (!in.has("eps")) in["eps"] = 0.0;
  in["out"] = out, in["lse"] = lse;
  in.join_first_two({"query", "state_out", "state_lse", "out", "lse"});
  in.run("projected_attention_forward");
  return {out, lse};
}

int64_t index_of(const std::string& name, std::initializer_list<const char*> names) {
  const auto* const found = std::find(names.begin(), names.end(), name);
  TORCH_CHECK_VALUE(found != names.end(), "no kernel of cmab supports ", name);
  return found - names.begin();
}

void number_residual(Call& in) { in["residual"] = index_of(in["residual"].toStringRef(), {"input", "normed"}); }

Tensors feed_forward_layer(Call& in) {
  const at::Tensor y = at::empty_like(in.tensor("x"), at::MemoryFormat::Contiguous);
  in.make_contiguous({"norm_weight", "norm_bias", "expand_bias", "contract_bias"});
  in["activation"] = index_of(in["activation"].toStringRef(), {"geglu", "gelu", "relu"});
  number_residual(in);
  in["y"] = y;
  in.run("feed_forward_layer");
  return {y};
}

Tensors attention_layer(Call& in) {
  const at::Tensor x = in.tensor("x"), context = in.has("context") ? in.tensor("context") : x;
  const int64_t batch = x.size(0), latents = x.size(1), keys = context.size(1), heads = in["num_heads"].toInt();
  const int64_t depth = in.tensor("key_weight").size(0), width = in.tensor("value_weight").size(0);
  const at::ScalarType sums = sums_of(x);
  const at::Tensor y = at::empty_like(x, at::MemoryFormat::Contiguous), query = empty(x, {batch, latents, depth}, sums),
                   key = empty(x, {batch, keys, depth}, sums), value = empty(x, {batch, keys, width}, sums),
                   out = empty(x, {batch, heads, latents, width / heads}, sums),
                   lse = empty(x, {batch, heads, latents}, at::kDouble);
  const bool keep = in.taken("keep").toBool();
  in.make_contiguous({"norm_weight", "norm_bias", "context_norm_weight", "context_norm_bias", "query_bias", "key_bias",
                      "value_bias", "output_bias", "key_padding_mask"});
  number_residual(in);
  in["batch"] = batch, in["y"] = y;
  in["query"] = query, in["key"] = key, in["value"] = value, in["out"] = out, in["lse"] = lse;
  in.join_first_two({"x", "context", "key_padding_mask", "query", "key", "value", "y"});
  if (y.numel()) in.run("attention_layer");
  if (keep) return {y, query, key, value, out, lse};
  const auto nothing = [&](at::ScalarType type) { return empty(x, {0}, type); };
  return {y, nothing(sums), nothing(sums), nothing(sums), nothing(sums), nothing(at::kDouble)};
}

// The number of sets of rows: packed sets lie between the offsets.
int64_t sets_of(Call& in, const at::Tensor& rows) {
  return in.has("cu_seqlens") ? in.tensor("cu_seqlens").size(0) - 1 : rows.size(0);
}

Tensors gram(Call& in) {
  const at::Tensor key = in.tensor("key"), value = in.tensor("value");
  const std::vector<int64_t> parts = in.taken("parts").toIntVector();
  const auto sum = [&](const char* name, bool part, int64_t columns) {
    const at::Tensor made = part ? empty(key, {sets_of(in, key), key.size(1), key.size(3), columns}, at::kDouble)
                                 : empty(key, {0}, at::kDouble);
    in[name] = part ? c10::IValue(made) : c10::IValue();
    return made;
  };
  const at::Tensor made = sum("gram", parts[0], key.size(3)), moment = sum("moment", parts[1], value.size(3));
  in.run("gram");
  return {made, moment};
}

Tensors ridge_update(Call& in) {
  const at::Tensor key = in.tensor("key"), value = in.tensor("value");
  for (const char* name : {"gram", "moment", "count"}) in[std::string(name) + "_before"] = in.taken(name);
  const int64_t batch = sets_of(in, key), heads = key.size(1), width = key.size(3);
  const at::Tensor gram = empty(key, {batch, heads, width, width}, at::kDouble),
                   moment = empty(key, {batch, heads, width, value.size(3)}, at::kDouble),
                   count = empty(key, {batch, heads}, at::kLong);
  in["gram"] = gram, in["moment"] = moment, in["count"] = count;
  in.run("ridge_update");
  return {gram, moment, count};
}

Tensors apply_rows(Call& in) {
  const at::Tensor query = in.tensor("query");
  std::vector<int64_t> shape = query.sizes().vec();
  shape.back() = in.tensor("weight").size(-1);
  const at::Tensor out = empty(query, shape, query.scalar_type());
  in["out"] = out;
  in.run("apply_rows");
  return {out};
}

Tensors regularised_solve(Call& in) {
  const at::Tensor rhs = in.tensor("rhs"), weight = at::empty_like(rhs, at::MemoryFormat::Contiguous),
                   info = empty(rhs, {rhs.size(0)}, at::kInt);
  in["weight"] = weight, in["info"] = info;
  in.run("regularised_solve");
  return {weight, info};
}

Tensors iterative_pinv(Call& in) {
  const at::Tensor inverse = at::empty_like(in.tensor("matrix"), at::MemoryFormat::Contiguous);
  in["inverse"] = inverse;
  in.run("iterative_pinv");
  return {inverse};
}

Tensors landmark_values(Call& in) {
  const at::Tensor out = at::empty_like(in.tensor("values"), at::MemoryFormat::Contiguous);
  in["out"] = out;
  in.run("landmark_values");
  return {out};
}

Tensors prefix_attention(Call& in) {
  const at::Tensor query = in.tensor("query"), value = in.tensor("value");
  const int64_t every = in["every"].toInt(), prefixes = (value.size(2) + every - 1) / every;
  const int64_t batch = query.size(0), heads = query.size(1), latents = query.size(2);
  const at::Tensor out = empty(query, {batch, heads, prefixes, latents, value.size(3)}, sums_of(query)),
                   lse = empty(query, {batch, heads, prefixes, latents}, at::kDouble);
  in["out"] = out.flatten(2, 3), in["lse"] = lse.flatten(2, 3);
  in.run("prefix_forward");
  return {out, lse};
}

// ---- steps. Unlike in Python, a step always goes to new memory.

struct Rings {
  at::Tensor queries, keys, values;
};

// Reads the arguments that both kinds of steps share, and makes new rings and outputs.
Rings begin_step(Call& in, cpu::Stream& stream, cpu::OldRings& old, at::Tensor& position, at::Tensor& out) {
  in.make_contiguous({"queries", "keys", "values", "sums", "position"});
  const at::Tensor queries = in.tensor("queries"), keys = in.tensor("keys"), values = in.tensor("values");
  const at::Tensor query = in.tensor("query"), key = in.tensor("key"), value = in.tensor("value");
  constexpr at::ScalarType kTypes[] = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf};
  const auto* const type = std::find(std::begin(kTypes), std::end(kTypes), keys.scalar_type());
  TORCH_CHECK_VALUE(type != std::end(kTypes), "keys: no kernel for ", keys.scalar_type());
  cpu::StreamShape& shape = stream.shape;
  shape = {DType(type - kTypes),      keys.size(0),        keys.size(1),
           in["window"].toInt(),      keys.size(2),        query.size(2),
           int(keys.size(3)),         int(values.size(3)), in.tensor("scale").item<double>(),
           in["retroactive"].toBool()};
  position = in.tensor("position");
  const auto* const positions = position.const_data_ptr<int64_t>();
  TORCH_CHECK_VALUE(std::all_of(positions, positions + position.numel(), [&](int64_t p) { return p >= shape.window; }),
                    "position: got a window that is not full");
  TORCH_CHECK_VALUE(shape.tokens >= 1 && shape.capacity > shape.window,
                    "query: got no token, or rings without a free row");
  stream.positions = positions, stream.absent = nullptr;
  const auto operand = [](const at::Tensor& tensor) {
    cpu::Operand made{};
    made.data = tensor.data_ptr();
    std::copy_n(tensor.strides().data(), 4, made.stride);
    return made;
  };
  stream.query = operand(query), stream.key = operand(key), stream.value = operand(value);
  old = {queries.data_ptr(), keys.data_ptr(), values.data_ptr(), shape.capacity};
  if (shape.capacity < shape.window + shape.tokens)
    shape.capacity = shape.window + std::min(shape.tokens, shape.window);
  const auto ring = [&](const at::Tensor& like) {
    return empty(like, {shape.batch, shape.heads, shape.capacity, like.size(3)}, like.scalar_type());
  };
  const Rings rings{ring(queries), ring(keys), ring(values)};
  stream.queries = rings.queries.data_ptr(), stream.keys = rings.keys.data_ptr();
  stream.values = rings.values.data_ptr();
  out = empty(value, {shape.batch, shape.heads, shape.retroactive ? shape.window : shape.tokens, value.size(3)},
              value.scalar_type());
  stream.out = out.data_ptr();
  return rings;
}

Tensors continual_nystrom_step(Call& in) {
  cpu::NystromStream stream{};
  cpu::OldRings old;
  at::Tensor position, out;
  const Rings rings = begin_step(in, stream, old, position, out);
  in.make_contiguous({"landmark_queries", "landmark_keys", "inverse"});
  at::Tensor near = in.tensor("landmark_queries"), far = in.tensor("landmark_keys"), inverse = in.tensor("inverse");
  const at::Tensor sums = in.tensor("sums"), new_sums = at::empty_like(sums);
  stream.landmarks = sums.size(2), stream.iterations = int(in["iterations"].toInt());
  stream.fixed = in["fixed"].toInt() != 0;
  TORCH_CHECK_VALUE(stream.fixed || stream.iterations >= 1, "iterations: the exact pseudo-inverse has no kernel");
  stream.sums = sums.data_ptr(), stream.new_sums = new_sums.data_ptr();
  cpu::OldLandmarks before;
  const bool replaces = replaces_landmark(stream);
  if (replaces) before = {near.data_ptr(), far.data_ptr(), inverse.data_ptr()};
  const Tensors kept = {near, far, inverse};  // which `before` reads
  for (at::Tensor* part : {&near, &far, &inverse}) *part = replaces ? at::empty_like(*part) : part->clone();
  stream.landmark_queries = near.data_ptr(), stream.landmark_keys = far.data_ptr();
  stream.inverse = inverse.data_ptr();
  const int threads = cpu::useful_threads(multiplications(stream), 2) > 1 ? at::get_num_threads() : 1;
  const cpu::ContinualKernel& kernel = cpu::continual_kernel(stream.shape.dtype);
  TORCH_CHECK_VALUE(finite(kernel, stream, threads), "query, key, value: got a NaN or an infinity");
  continual_nystrom(kernel, stream, old, before, threads);
  return {out, rings.queries, rings.keys, rings.values, new_sums, near, far, inverse, position + stream.shape.tokens};
}

Tensors continual_attention_step(Call& in) {
  cpu::AttentionStream stream{};
  cpu::OldRings old;
  at::Tensor position, out;
  const Rings rings = begin_step(in, stream, old, position, out);
  const cpu::StreamShape& shape = stream.shape;
  const at::Tensor sums = in.tensor("sums");
  const at::Tensor new_sums =
      empty(sums, {shape.batch, shape.heads, shape.retroactive ? shape.window : 0, sums.size(3)}, sums.scalar_type());
  stream.sums = sums.size(2) ? sums.data_ptr() : nullptr;
  stream.new_sums = new_sums.size(2) ? new_sums.data_ptr() : nullptr;
  const int threads = cpu::useful_threads(multiplications(stream), 2) > 1 ? at::get_num_threads() : 1;
  const cpu::ContinualKernel& kernel = cpu::continual_kernel(shape.dtype);
  TORCH_CHECK_VALUE(finite(kernel, stream, threads), "query, key, value: got a NaN or an infinity");
  continual_attention(kernel, stream, old, threads);
  return {out, rings.queries, rings.keys, rings.values, new_sums, position + shape.tokens};
}

template <auto kOperator>
void boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  find_functions();
  Call in(op.schema(), *stack);
  Tensors results = kOperator(in);
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (at::Tensor& result : results) stack->emplace_back(std::move(result));
}

// Defines cmab::NAME, whose results the function computes.
template <auto kOperator>
void define(torch::Library& library, const char* schema) {
  library.def(schema);
  library.impl(std::string(schema, std::strchr(schema, '(')).c_str(),
               torch::dispatch(c10::DispatchKey::CPU, torch::CppFunction::makeFromBoxedFunction<&boxed<kOperator>>()));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cmab, library) {
  define<attention>(library,
                    "attention(Tensor query, Tensor key, Tensor value, Tensor? key_padding_mask, Tensor? cu_seqlens, "
                    "Tensor? state_out, Tensor? state_lse, Tensor? key_bias, float scale, str impl) -> (Tensor out, "
                    "Tensor lse)");
  define<projected_attention>(
      library,
      "projected_attention(Tensor query, Tensor inputs, Tensor weight, Tensor bias, Tensor? "
      "key_padding_mask, Tensor? cu_seqlens, Tensor? state_out, Tensor? state_lse, float scale, float? eps, "
      "str impl) -> (Tensor out, Tensor lse)");
  define<attention_layer>(
      library,
      "attention_layer(Tensor x, Tensor? context, Tensor? key_padding_mask, Tensor? norm_weight, Tensor? "
      "norm_bias, Tensor? context_norm_weight, Tensor? context_norm_bias, Tensor query_weight, Tensor? "
      "query_bias, Tensor key_weight, Tensor? key_bias, Tensor value_weight, Tensor? value_bias, Tensor "
      "output_weight, Tensor? output_bias, int num_heads, float scale, float eps, float context_eps, str "
      "residual, bool keep, str impl) -> (Tensor y, Tensor query, Tensor key, Tensor value, Tensor out, "
      "Tensor lse)");
  define<feed_forward_layer>(
      library,
      "feed_forward_layer(Tensor x, Tensor? norm_weight, Tensor? norm_bias, Tensor expand_weight, Tensor? "
      "expand_bias, Tensor contract_weight, Tensor? contract_bias, float eps, str activation, str residual, "
      "str impl) -> Tensor");
  define<gram>(library,
               "gram(Tensor key, Tensor value, Tensor? weights, Tensor? key_padding_mask, Tensor? cu_seqlens, int[2] "
               "parts, bool exact, str impl) -> (Tensor gram, Tensor moment)");
  define<ridge_update>(
      library,
      "ridge_update(Tensor key, Tensor value, Tensor? weights, Tensor? key_padding_mask, Tensor? cu_seqlens, Tensor? "
      "gram, Tensor? moment, Tensor? count, str impl) -> (Tensor gram, Tensor moment, Tensor count)");
  define<apply_rows>(library, "apply_rows(Tensor query, Tensor weight, str impl) -> Tensor");
  define<regularised_solve>(
      library, "regularised_solve(Tensor gram, Tensor rhs, Tensor alpha, str impl) -> (Tensor weight, Tensor info)");
  define<iterative_pinv>(library, "iterative_pinv(Tensor matrix, int iterations, str impl) -> Tensor");
  define<landmark_values>(
      library,
      "landmark_values(Tensor landmark_query, Tensor landmark_key, Tensor values, Tensor? absent, float scale, int "
      "iterations, str impl) -> Tensor");
  define<prefix_attention>(
      library,
      "prefix_attention(Tensor query, Tensor key, Tensor value, Tensor? key_padding_mask, Tensor? state_out, Tensor? "
      "state_lse, Tensor? key_bias, Tensor? log_decay, int every, float scale, str impl) -> (Tensor out, Tensor lse)");
  define<continual_nystrom_step>(
      library,
      "continual_nystrom_step(Tensor queries, Tensor keys, Tensor values, Tensor sums, Tensor "
      "landmark_queries, Tensor landmark_keys, Tensor inverse, Tensor scale, Tensor position, SymInt "
      "window, int iterations, int fixed, Tensor query, Tensor key, Tensor value, bool retroactive, str "
      "impl) -> (Tensor out, Tensor new_queries, Tensor new_keys, Tensor new_values, Tensor new_sums, "
      "Tensor new_landmark_queries, Tensor new_landmark_keys, Tensor new_inverse, Tensor new_position)");
  define<continual_attention_step>(
      library,
      "continual_attention_step(Tensor queries, Tensor keys, Tensor values, Tensor sums, Tensor scale, "
      "Tensor position, SymInt window, Tensor query, Tensor key, Tensor value, bool retroactive, str impl) "
      "-> (Tensor out, Tensor new_queries, Tensor new_keys, Tensor new_values, Tensor new_sums, Tensor "
      "new_position)");
}

}  // namespace cmab::operators
