#include "kernels.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include "counts.h"
#include "device.h"
#include "signatures.h"

namespace sim {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

Tensor host_view(const Tensor& tensor) {
  auto memory = memory_of(tensor.storage().data_ptr());
  auto* keep = new MemoryP(memory);
  c10::DataPtr data(memory ? memory->data : nullptr, keep, [](void* kept) { delete static_cast<MemoryP*>(kept); }, c10::Device(c10::kCPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), nullptr, false);
  auto view = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}

std::vector<Tensor> host_views(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> views;
  for (const auto& tensor : tensors) views.push_back(host_view(tensor));
  return views;
}

void launch(Queue& queue, std::vector<Use> uses, const std::string& what, std::function<void()> work) {
  raise_late_errors();
  uses.erase(std::remove_if(uses.begin(), uses.end(), [](const Use& use) { return !use.memory; }), uses.end());
  check_launch(queue.clock, queue.actor, uses, here(what));
  queue.push(std::move(work));
}

namespace {

template <class F>
void each_tensor(IValue& value, F replace) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = replace(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(tensor.defined() ? replace(tensor) : tensor);
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor && tensor->defined() ? std::optional<Tensor>(replace(*tensor)) : tensor);
    value = list;
  }
}

// ---------------------------------------------------------------- kernels of other devices

struct BelowAutograd {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

Stack run(const c10::OperatorHandle& op, c10::DispatchKey key, const std::vector<IValue>& arguments) {
  BelowAutograd guard;
  Stack stack(arguments.begin(), arguments.end());
  op.redispatchBoxed(c10::DispatchKeySet(key), &stack);
  return stack;
}

// CPU kernels that want other dtypes than those of CUDA: its softmax widens on the way, and its layer norm keeps statistics in fp32.
void suit_cpu(const std::string& name, std::vector<IValue>& given) {
  BelowAutograd guard;
  bool softmax = begins(name, "aten::_softmax") || begins(name, "aten::_log_softmax");
  if (softmax && name.find("backward") == std::string::npos && given[2].isBool() && given[2].toBool()) {
    given[0] = given[0].toTensor().to(at::kFloat);
    given[2] = false;
  } else if (name == "aten::native_layer_norm_backward") {
    auto input = given[1].toTensor().scalar_type();
    bool wide = given[5].isTensor() && given[5].toTensor().defined() && given[5].toTensor().scalar_type() != input;
    for (int i : {3, 4}) given[i] = given[i].toTensor().to(wide ? at::kFloat : input);
  }
}

Stack run_on_cpu(const c10::OperatorHandle& op, const std::string& name, std::vector<IValue> given) {
  suit_cpu(name, given);
  try {
    return run(op, c10::DispatchKey::CPU, given);
  } catch (c10::Error& error) {
    error.add_context("on the simulated device, in " + name);
    throw;
  }
}

void copy_into(const IValue& to, const IValue& from) {
  BelowAutograd guard;
  if (to.isTensor() && to.toTensor().defined()) to.toTensor().copy_(from.toTensor());
  if (!to.isTensorList()) return;
  auto targets = to.toTensorVector(), sources = from.toTensorVector();
  for (size_t i = 0; i < targets.size(); i++) targets[i].copy_(sources[i]);
}

// ---------------------------------------------------------------- one call

struct Call {
  const c10::OperatorHandle& op;
  const Signature& is;
  std::vector<IValue> given, cpu, meta;
  c10::Device device{CUDA, static_cast<c10::DeviceIndex>(current_device())};
  std::vector<Use> uses;
  bool waits = false;  // CUDA would: the shape of the result or the value is needed now

  Call(const c10::OperatorHandle& op, const Signature& is, std::vector<IValue> arguments) : op(op), is(is), given(std::move(arguments)) {
    find_device();
    cpu = meta = given;
    waits = is.any(Signature::VALUE) || waits_for_values(is.name) || (is.name == "aten::repeat_interleave.Tensor" && given[1].isNone());
    for (size_t i = 0; i < given.size(); i++) take(i);
  }

  void find_device() {
    bool found = false;
    for (auto& value : given)
      each_tensor(value, [&](const Tensor& tensor) {
        if (!on_device(tensor)) return tensor;
        TORCH_CHECK(!found || device == tensor.device(), "Expected all tensors to be on the same device, but found at least two devices, ", device,
                    " and ", tensor.device(), "! (", is.name, ")");
        device = tensor.device();
        found = true;
        return tensor;
      });
    for (auto& value : given)
      if (!found && value.isDevice() && value.toDevice().type() == CUDA && value.toDevice().has_index()) device = value.toDevice();
  }

  // One argument, for each of both kernels.
  void take(size_t i) {
    const auto& argument = op.schema().arguments()[i];
    bool indices = is_index(is.name) && given[i].isOptionalTensorList();
    each_tensor(given[i], [&](const Tensor& tensor) {
      if (indices && (!on_device(tensor) || tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte)) waits = true;
      bool scalar = tensor.dim() == 0 && tensor.device().is_cpu() && !takes_no_host_scalar(is.name);
      TORCH_CHECK(on_device(tensor) || indices || scalar || tensor.device().is_meta(), "Expected all tensors to be on the same device, but found ",
                  "at least two devices, ", device, " and cpu! (argument ", argument.name(), " of ", is.name, ")");
      if (on_device(tensor)) uses.push_back(use_of(tensor, is.writes[i]));
      else host_uses(tensor, false, is.name);
      return tensor;
    });
    each_tensor(cpu[i], [](const Tensor& tensor) { return on_device(tensor) ? host_view(tensor) : tensor.detach().clone(); });
    each_tensor(meta[i], [](const Tensor& tensor) {
      auto shape = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).requires_grad(false));
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) shape.unsafeGetTensorImpl()->set_wrapped_number(true);
      return shape;
    });
    if (given[i].isDevice()) {
      cpu[i] = c10::Device(c10::kCPU);
      meta[i] = c10::Device(c10::kMeta);
    }
    if (argument.name() == "generator") {
      cpu[i] = drawn_from(given[i].isNone() ? std::nullopt : std::optional<at::Generator>(given[i].toGenerator()), device.index());
      meta[i] = IValue();
    }
  }

  Tensor like(const Tensor& tensor) const { return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device)); }
  Queue& queue() const { return current_queue(device.index()); }

  // The results, not computed yet; nothing if there is no Meta kernel.
  std::optional<std::vector<IValue>> shaped() {
    if (waits || is.any(Signature::VIEW)) return std::nullopt;
    bool empty = false;
    for (int from : is.argument)
      if (from >= 0) each_tensor(given[from], [&](const Tensor& tensor) { empty = empty || tensor.numel() == 0; return tensor; });
    std::vector<IValue> results(is.returns.size());
    Stack shapes(results.begin(), results.end());
    if (is.any(Signature::NEW) || empty) {
      try {
        shapes = run(op, c10::DispatchKey::Meta, meta);
      } catch (const std::exception&) {
        return std::nullopt;
      }
    }
    for (size_t r = 0; r < results.size(); r++) {
      int from = is.argument[r];
      results[r] = from >= 0 ? given[from] : shapes[r];
      if (from < 0) {
        each_tensor(results[r], [&](const Tensor& tensor) { return like(tensor); });
      } else if (given[from].isTensor() && shapes[r].isTensor() && given[from].toTensor().sizes() != shapes[r].toTensor().sizes()) {
        given[from].toTensor().resize_(shapes[r].toTensor().sizes());
        cpu[from] = host_view(given[from].toTensor());
      }
    }
    return results;
  }

  std::vector<IValue> later(std::vector<IValue> results) {
    std::vector<IValue> targets(results.size());
    for (size_t r = 0; r < results.size(); r++) {
      if (is.returns[r] != Signature::NEW) continue;
      targets[r] = results[r];
      each_tensor(targets[r], [&](const Tensor& tensor) { uses.push_back(use_of(tensor, true)); return host_view(tensor); });
    }
    launch(queue(), uses, is.name, [op = op, name = is.name, cpu = cpu, targets] {
      auto computed = run_on_cpu(op, name, cpu);
      for (size_t r = 0; r < targets.size(); r++) copy_into(targets[r], computed[r]);
    });
    return results;
  }

  // CUDA waits here too, or torch has no Meta kernel: then the simulation waits, and nobody learns that the work is done.
  std::vector<IValue> now() {
    if (waits) start_synchronizing(is.name);
    else if (!is.any(Signature::VIEW)) count("no Meta kernel: " + is.name);
    for (size_t r = 0; r < is.returns.size(); r++)
      if (is.argument[r] >= 0)
        each_tensor(cpu[is.argument[r]], [](const Tensor& tensor) { return tensor.numel() ? tensor : at::empty({0}, tensor.options()); });
    auto computed = std::make_shared<Stack>();
    auto failed = std::make_shared<std::exception_ptr>();
    launch(queue(), uses, is.name, [op = op, name = is.name, cpu = cpu, computed, failed] {
      try {
        *computed = run_on_cpu(op, name, cpu);
      } catch (...) {
        *failed = std::current_exception();
      }
    });
    if (waits) synchronize_stream(queue());
    else queue().wait(queue().last());
    if (*failed) std::rethrow_exception(*failed);
    for (size_t r = 0; r < is.returns.size(); r++) deliver(r, (*computed)[r]);
    return {computed->begin(), computed->end()};
  }

  void deliver(size_t r, IValue& value) {
    auto copied = [&](const Tensor& target, const Tensor& source) {
      launch(queue(), {use_of(target, true)}, is.name, [to = host_view(target), source] { copy_into(to, source); });
      return target;
    };
    switch (is.returns[r]) {
      case Signature::VALUE: return;
      case Signature::NEW: each_tensor(value, [&](const Tensor& tensor) { return copied(like(tensor), tensor); }); return;
      case Signature::VIEW:
        each_tensor(value, [&](const Tensor& view) { return given[0].toTensor().as_strided(view.sizes(), view.strides(), view.storage_offset()); });
        return;
      case Signature::WRITTEN:
        if (auto& target = given[is.argument[r]]; target.isTensor() && target.toTensor().sizes() != value.toTensor().sizes()) {
          target.toTensor().resize_(value.toTensor().sizes());
          copied(target.toTensor(), value.toTensor());
        }
        value = given[is.argument[r]];
    }
  }
};

void any_operator(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  size_t first = stack->size() - op.schema().arguments().size();
  Call call(op, signature_of(op), {stack->begin() + first, stack->end()});
  auto shaped = call.shaped();
  if (shaped) count("kernels");
  auto results = shaped ? call.later(*shaped) : call.now();
  stack->resize(first);
  for (auto& result : results) stack->push_back(result);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>()); }

// Operators that torch would compose of others, with other roundings, for a device that has no kernel of its own, or of those that only CUDA has.
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  for (const char* name : {"native_layer_norm", "native_group_norm", "convolution", "convolution_backward"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&any_operator>());
}

}  // namespace sim
