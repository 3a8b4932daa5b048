// Operators that are no kernels: tensors made, resized, viewed, copied and read.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

#include "counts.h"
#include "kernels.h"

namespace sim {

using at::Tensor;

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  int device = storage->device().index();
  auto before = memory_of(storage->data_ptr());
  auto fresh = allocate_on(device, bytes);
  if (auto kept = std::min(bytes, storage->nbytes()); kept && before) {
    auto after = *static_cast<MemoryP*>(fresh.get_context());
    launch(current_queue(device), {{before, 0, kept, false}, {after, 0, kept, true}}, "resize_",
           [before, after, kept] { std::memcpy(after->data, before->data, kept); });
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

namespace {

// ---------------------------------------------------------------- made and resized

c10::Device where(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : c10::Device(CUDA, current_device());
}
void refuse_pinned(std::optional<bool> pin) { TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned"); }

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<c10::Device> device,
             std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  refuse_pinned(pin);
  c10::DeviceGuard guard(where(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<c10::Device> device, std::optional<bool> pin) {
  refuse_pinned(pin);
  c10::DeviceGuard guard(where(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}
const Tensor& resize(const Tensor& self, c10::SymIntArrayRef symbolic, std::optional<at::MemoryFormat>) {
  auto size = C10_AS_INTARRAYREF_SLOW(symbolic);
  if (self.sizes() == size) return self;
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  size_t bytes = (self.numel() + self.storage_offset()) * self.itemsize();
  if (self.numel() && bytes > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), bytes);
  return self;
}
Tensor& set_empty(Tensor& self) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, allocate_on(self.device().index(), 0), device_allocator(), true);
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  self.unsafeGetTensorImpl()->set_storage_offset(0);
  self.unsafeGetTensorImpl()->set_sizes_contiguous({0});
  return self;
}
Tensor& set_strided(Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.data()) self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  else self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

// ---------------------------------------------------------------- copied and read

void copy_on_cpu(const Tensor& to, const Tensor& from) {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  to.copy_(from);
}

void between_devices(const Tensor& to, const Tensor& from) {
  auto& queue = current_queue(to.device().index());
  if (to.device() != from.device()) wait_on_stream(queue, moment_of(current_queue(from.device().index())));
  launch(queue, {use_of(from, false), use_of(to, true)}, "copy_", [a = host_view(to), b = host_view(from)] { copy_on_cpu(a, b); });
}

// What torch hands to one cudaMemcpyAsync; else it converts on the host first, in memory that is not pinned.
bool one_copy(const Tensor& to, const Tensor& from) { return to.scalar_type() == from.scalar_type() && to.strides() == from.strides(); }

void to_the_device(const Tensor& to, const Tensor& from, bool non_blocking) {
  auto& queue = current_queue(to.device().index());
  bool late = non_blocking && is_pinned(from) && one_copy(to, from);
  // Pageable memory is read before the call returns, whatever is queued.
  if (!late) host_uses(from, false, "copy_");
  auto source = late ? from.detach() : from.detach().clone();
  count(late ? "copies to the device, pinned" : "copies to the device, pageable");
  if (!non_blocking) start_synchronizing("copy_ to the device");
  launch(queue, {late ? use_of(from, false) : Use{}, use_of(to, true)}, "copy_ to the device", [a = host_view(to), source] { copy_on_cpu(a, source); });
  if (!non_blocking) synchronize_stream(queue);
}

void to_the_host(const Tensor& to, const Tensor& from, bool non_blocking) {
  auto& queue = current_queue(from.device().index());
  bool late = non_blocking && is_pinned(to) && one_copy(to, from);
  count(late ? "copies to the host, pinned" : "copies to the host, pageable");
  if (!non_blocking) start_synchronizing("copy_ to the host");
  if (late) {
    launch(queue, {use_of(from, false), use_of(to, true)}, "copy_ to the host", [a = to.detach(), b = host_view(from)] { copy_on_cpu(a, b); });
    return;
  }
  host_uses(to, true, "copy_");
  // To pageable memory cudaMemcpyAsync returns when it is done, non_blocking or not.
  launch(queue, {use_of(from, false)}, "copy_ to the host", [a = to.detach(), b = host_view(from)] { copy_on_cpu(a, b); });
  synchronize_stream(queue);
}

Tensor& copy(Tensor& self, const Tensor& given, bool non_blocking) {
  if (self.is_same(given) || self.numel() == 0) return self;
  auto source = given.sizes() == self.sizes() ? given : given.expand(self.sizes());
  TORCH_CHECK(self.layout() == at::kStrided && source.layout() == at::kStrided, "the simulated device has only strided tensors");
  if (on_device(self) && on_device(source)) between_devices(self, source);
  else if (on_device(self)) to_the_device(self, source, non_blocking);
  else to_the_host(self, source, non_blocking);
  return self;
}

at::Scalar read(const Tensor& self) {
  start_synchronizing("item");
  auto& queue = current_queue(self.device().index());
  auto view = host_view(self);
  launch(queue, {use_of(self, false)}, "item", [] {});
  synchronize_stream(queue);
  return at::_local_scalar_dense(view);
}

// ---------------------------------------------------------------- others

// The CPU's draws its mask inside one kernel that has no generator.
std::tuple<Tensor, Tensor> dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || input.numel() == 0) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  auto mask = at::empty_like(input, input.options().dtype(at::kBool));
  mask.bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0. : 1. / (1 - p)), mask};
}
int64_t plain_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;
}
void record(Tensor& self, c10::Stream stream) { record_stream(self.storage().data_ptr(), stream); }

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("resize_", &resize);
  library.impl("set_", &set_empty);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("set_.source_Storage", &at::native::set_);
  library.impl("set_.source_Storage_storage_offset", &set_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("copy_", &copy);
  library.impl("_local_scalar_dense", &read);
  library.impl("native_dropout", &dropout);
  library.impl("_fused_sdp_choice", &plain_attention);
  library.impl("record_stream", &record);
}

}  // namespace sim
