// Python bindings of the sums over keys (K'WK, K'WV), their gradient, and rows times matrices, on the CPU.
#include "common/arguments.h"
#include "common/bindings.h"
#include "intention/call.h"
#include "solve/solve.h"

using namespace cmab::cpu;

namespace cmab {
namespace {

GramInputs read_inputs(Arguments& in) {
  GramInputs inputs{};
  const TensorView offsets = in.optional("cu_seqlens", "S", Types(DType::kInt32) | DType::kInt64);
  const bool packed = offsets.data != nullptr;
  const TensorView key = in.tensor("key", packed ? "1HND" : "BHND", kFloating);
  const TensorView value = in.tensor("value", packed ? "1HNE" : "BHNE", key.dtype);
  const TensorView weights = in.optional("weights", packed ? "1HN" : "BHN", state_type(key.dtype));
  const TensorView ignored = in.optional("key_padding_mask", packed ? "1N" : "BN", DType::kBool);
  in.require(key.shape[3] >= 1, "key", "has no column");
  inputs.shape = {key.dtype, int(key.shape[3]), int(value.shape[3])};
  inputs.batch = packed ? offsets.shape[0] - 1 : key.shape[0], inputs.heads = key.shape[1], inputs.keys = key.shape[2];
  inputs.offsets = {offsets.data, offsets.dtype == DType::kInt64, offsets.stride[0]};
  inputs.key = operand(key), inputs.value = operand(value), inputs.weight = operand(weights);
  inputs.ignored = static_cast<const uint8_t*>(ignored.data);
  inputs.ignored_stride[0] = ignored.stride[0], inputs.ignored_stride[1] = ignored.stride[1];
  inputs.threads = torch_threads();
  return inputs;
}

// The sums have been read, and with them the number of sets.
void check_sets(const Arguments& in, const GramInputs& inputs) {
  in.require(inputs.batch == in.extent('B'), "cu_seqlens", "must have one element more than there are sums");
}

void sums(Arguments& in) {
  GramInputs inputs = read_inputs(in);
  inputs.exact = in.flag("exact");
  auto* of_keys = static_cast<double*>(in.optional_contiguous("gram", "BHDD", DType::kFloat64).data);
  auto* moment = static_cast<double*>(in.optional_contiguous("moment", "BHDE", DType::kFloat64).data);
  if (of_keys || moment) check_sets(in, inputs);
  in.run([&] { gram(inputs, of_keys, moment); });
}

// The tensors that an update of a state reads and fills.
struct Update {
  GramInputs inputs;
  RidgeSums before;
  double *gram, *moment;
  int64_t* count;

  explicit Update(Arguments& in) : inputs(read_inputs(in)) {
    inputs.exact = true;
    before.gram = operand(in.optional("gram_before", "BHDD", DType::kFloat64));
    before.moment = operand(in.optional("moment_before", "BHDE", DType::kFloat64));
    before.count = operand(in.optional("count_before", "BH", DType::kInt64));
    gram = static_cast<double*>(in.contiguous("gram", "BHDD", DType::kFloat64).data);
    moment = static_cast<double*>(in.contiguous("moment", "BHDE", DType::kFloat64).data);
    count = static_cast<int64_t*>(in.contiguous("count", "BH", DType::kInt64).data);
    check_sets(in, inputs);
  }

  void run() const { ridge_update(inputs, before, gram, moment, count); }
};

void update(Arguments& in) {
  const Update update(in);
  in.run([&] { update.run(); });
}

// An update, and the solution of the updated state.
void step(Arguments& in) {
  const Update update(in);
  const int64_t width = update.inputs.shape.key_width, columns = update.inputs.shape.value_width;
  Systems systems{};
  systems.count = update.inputs.batch * update.inputs.heads, systems.order = width, systems.columns = columns;
  systems.gram = {update.gram, {width * width, width, 1}}, systems.rhs = {update.moment, {width * columns, columns, 1}};
  systems.alpha = in.contiguous("alpha", "BH", DType::kFloat64).data, systems.alpha_stride = 1;
  systems.weight = in.contiguous("weight", "BHDE", DType::kFloat64).data;
  systems.info = static_cast<int32_t*>(in.contiguous("info", "BH", DType::kInt32).data);
  in.run([&] {
    update.run();
    regularised_solve(DType::kFloat64, systems, update.inputs.threads);
  });
}

void backward(Arguments& in) {
  GramInputs inputs = read_inputs(in);
  inputs.exact = in.flag("exact");
  const DType dtype = inputs.shape.dtype;
  const Operand dgram = operand(in.tensor("dgram", "BHDD", DType::kFloat64));
  const Operand dmoment = operand(in.tensor("dmoment", "BHDE", DType::kFloat64));
  check_sets(in, inputs);
  const bool packed = inputs.offsets.data;
  const GramGradient gradient{in.optional_contiguous("dkey", packed ? "1HND" : "BHND", dtype).data,
                              in.optional_contiguous("dvalue", packed ? "1HNE" : "BHNE", dtype).data,
                              in.optional_contiguous("dweights", packed ? "1HN" : "BHN", state_type(dtype)).data};
  in.run([&] { gram_backward(inputs, dgram, dmoment, gradient); });
}

void apply(Arguments& in) {
  RowsInputs inputs{};
  const TensorView query = in.tensor("query", "BHMD", kFloating), weight = in.tensor("weight", "BHDE", DType::kFloat64);
  inputs.dtype = query.dtype;
  inputs.batch = query.shape[0], inputs.heads = query.shape[1], inputs.rows = query.shape[2];
  inputs.depth = int(weight.shape[2]), inputs.width = int(weight.shape[3]);
  inputs.query = operand(query), inputs.matrix = operand(weight);
  inputs.threads = torch_threads();
  void* out = in.contiguous("out", "BHME", query.dtype).data;
  in.run([&] { apply_rows(inputs, out); });
}

}  // namespace

void bind_gram(PyObject* module) {
  define<sums>(module, "gram");
  define<update>(module, "ridge_update");
  define<step>(module, "ridge_step");
  define<backward>(module, "gram_backward");
  define<apply>(module, "apply_rows");
}

}  // namespace cmab
