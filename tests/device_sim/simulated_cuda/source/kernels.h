// Operators on the device: shaped on the host by their Meta kernels, computed later by their CPU kernels on a stream.
#pragma once
#include <ATen/core/Tensor.h>

#include "memory.h"

namespace sim {

inline bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == CUDA; }
// The same bytes as a tensor of the CPU, which keeps the block alive.
at::Tensor host_view(const at::Tensor& tensor);
std::vector<at::Tensor> host_views(const std::vector<at::Tensor>& tensors);
// Checks the order of what the work uses, and queues it.
void launch(Queue& queue, std::vector<Use> uses, const std::string& what, std::function<void()> work);
void resize_storage(c10::StorageImpl* storage, size_t bytes);

}  // namespace sim
