// Device memory and pinned memory, as torch's caching allocators give them.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include "streams.h"

namespace sim {

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
c10::DataPtr allocate_on(int device, size_t bytes);

MemoryP memory_of(const c10::DataPtr& data);  // null for what is not ours: pageable memory, or nothing
bool is_pinned(const void* pointer);
void record_stream(const c10::DataPtr& data, const c10::Stream& stream);

Use use_of(const at::Tensor& tensor, bool write);
inline bool is_pinned(const at::Tensor& tensor) {
  auto memory = memory_of(tensor.storage().data_ptr());
  return memory && memory->pinned;
}

// Watches what operators on the CPU do to pinned memory.
void watch_host();
void host_uses(const at::Tensor& tensor, bool write, const std::string& what);

size_t allocated(int device);
size_t peak(int device);
void reset_peak(int device);

}  // namespace sim
