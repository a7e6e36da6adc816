// Steps a stream with a program that Python exported, without Python:
//
//   step PACKAGE STREAM RESULTS
//
// PACKAGE is a file of torch._inductor.aoti_compile_and_package, of a program (new..., state...) -> (results...,
// state...). STREAM is a file of torch.save: the state before the stream, a list of tensors, and a list of the new
// tensors of each step. RESULTS becomes a file for torch.load with the results of the last step.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>

namespace {

using Tensors = std::vector<at::Tensor>;

c10::IValue loaded(const char* path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, path, ": cannot be read");
  return torch::pickle_load(std::vector<char>(std::istreambuf_iterator<char>(file), {}));
}

Tensors tensors_in(const c10::IValue& list) {
  Tensors all;
  for (const c10::IValue& each : list.toListRef()) all.push_back(each.toTensor());
  return all;
}

void run(const char* package, const char* stream, const char* results) {
  const c10::InferenceMode without_gradients;
  torch::inductor::AOTIModelPackageLoader program(package);
  const auto given = loaded(stream).toTuple();
  Tensors state = tensors_in(given->elements()[0]), out;
  double seconds = 0;
  size_t timed = 0, steps = 0;
  for (const c10::IValue& step : given->elements()[1].toListRef()) {
    Tensors inputs = tensors_in(step);
    inputs.insert(inputs.end(), state.begin(), state.end());
    const auto before = std::chrono::steady_clock::now();
    out = program.run(inputs);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - before;
    if (++steps > 10) seconds += took.count(), ++timed;  // the first steps warm up
    state.assign(out.end() - state.size(), out.end());
  }
  if (timed) std::printf("%.1f us a step\n", 1e6 * seconds / timed);
  const std::vector<char> bytes =
      torch::pickle_save(c10::ivalue::Tuple::create(std::vector<c10::IValue>(out.begin(), out.end())));
  std::ofstream(results, std::ios::binary).write(bytes.data(), bytes.size());
}

}  // namespace

int main(int count, char** words) {
  if (count != 4) return std::fprintf(stderr, "usage: step PACKAGE STREAM RESULTS\n"), 2;
  try {
    run(words[1], words[2], words[3]);
  } catch (const std::exception& error) {
    return std::fprintf(stderr, "%s\n", error.what()), 1;
  }
}
