#include "signatures.h"

#include <mutex>
#include <set>
#include <unordered_map>

namespace sim {

static bool is_write(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

static Signature described(const c10::FunctionSchema& schema) {
  Signature found;
  found.name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  const auto& arguments = schema.arguments();
  for (const auto& argument : arguments) found.writes.push_back(is_write(argument));
  for (const auto& result : schema.returns()) {
    auto kind = Signature::VALUE;
    int from = -1;
    if (is_write(result)) {
      kind = Signature::WRITTEN;
      for (size_t i = 0; i < arguments.size() && from < 0; i++)
        if (is_write(arguments[i]) && arguments[i].alias_info()->beforeSets() == result.alias_info()->beforeSets()) from = i;
    } else if (result.alias_info()) {
      kind = Signature::VIEW;
    } else if (result.type()->isSubtypeOf(*c10::TensorType::get()) || result.type()->kind() == c10::TypeKind::ListType ||
               result.type()->kind() == c10::TypeKind::OptionalType) {
      kind = Signature::NEW;
    }
    found.returns.push_back(kind);
    found.argument.push_back(from);
  }
  return found;
}

const Signature& signature_of(const c10::OperatorHandle& op) {
  static auto* mutex = new std::mutex;
  static auto* known = new std::unordered_map<c10::OperatorName, Signature>;
  std::lock_guard<std::mutex> lock(*mutex);
  auto found = known->find(op.operator_name());
  return found != known->end() ? found->second : known->emplace(op.operator_name(), described(op.schema())).first->second;
}

bool is_index(const std::string& name) {
  return begins(name, "aten::index") || begins(name, "aten::_index_put") || begins(name, "aten::_unsafe_index");
}
bool waits_for_values(const std::string& name) {
  static const std::set<std::string> names{"aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::masked_select.out", "aten::_unique",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount", "aten::equal",
    "aten::is_nonzero"};
  return names.count(name);
}
bool takes_no_host_scalar(const std::string& name) {
  static const std::set<std::string> names{"aten::index.Tensor", "aten::index.Tensor_out", "aten::_index_put_impl_", "aten::index_put_",
    "aten::_fused_adamw_", "aten::_fused_adam_", "aten::_fused_sgd_", "aten::_fused_adagrad_"};
  return names.count(name);
}

}  // namespace sim
