// What an operator returns and writes, from its schema, and what CUDA does with it that no schema says.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <string>
#include <vector>

namespace sim {

struct Signature {
  enum Kind { WRITTEN, VIEW, NEW, VALUE };
  std::string name;
  std::vector<Kind> returns;
  std::vector<int> argument;  // of a WRITTEN result
  std::vector<bool> writes;   // by argument
  bool any(Kind kind) const { return std::find(returns.begin(), returns.end(), kind) != returns.end(); }
};

// Known for each operator after its first call.
const Signature& signature_of(const c10::OperatorHandle& op);

inline bool begins(const std::string& name, const std::string& with) { return name.rfind(with, 0) == 0; }
bool is_index(const std::string& name);
bool waits_for_values(const std::string& name);  // the shape of the result depends on values, so CUDA waits for them
bool takes_no_host_scalar(const std::string& name);  // kernels that take no number of the host in the place of a tensor of the device

}  // namespace sim
