// A call of an operator: its arguments by name, changed to those of a function of csrc/*/binding.cpp, which fills the
// results.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <utility>
#include <vector>

namespace cmab::operators {

using Tensors = std::vector<at::Tensor>;

class Call {
 public:
  // The last arguments of the stack are those of the schema.
  Call(const c10::FunctionSchema& schema, const std::vector<c10::IValue>& stack);

  // Returns an argument, and adds it if it is new.
  c10::IValue& operator[](const std::string& name);
  at::Tensor tensor(const std::string& name) { return (*this)[name].toTensor(); }
  bool has(const std::string& name) { return !(*this)[name].isNone(); }
  c10::IValue taken(const std::string& name);  // Removes an argument, and returns it.

  // These change tensors that are not None.
  void make_contiguous(std::initializer_list<const char*> names);
  void join_first_two(std::initializer_list<const char*> names);

  // Calls the function of this name, which must read all arguments.
  void run(const char* function);

 private:
  std::vector<std::pair<std::string, c10::IValue>> arguments_;
};

// Makes the functions of csrc/*/binding.cpp known to Call::run. Another call does nothing.
void find_functions();

}  // namespace cmab::operators
