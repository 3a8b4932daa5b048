#include "memory.h"

#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstring>
#include <map>

namespace sim {
namespace {

// A storage's context: its share in the block.
MemoryP* handle(void* context) { return static_cast<MemoryP*>(context); }

std::mutex g_blocks_mutex;
std::map<Actor, std::vector<MemoryP>>& freed() { static auto* one = new std::map<Actor, std::vector<MemoryP>>; return *one; }
std::map<const char*, size_t>& pins() { static auto* one = new std::map<const char*, size_t>; return *one; }
constexpr int MOST_DEVICES = 16;
size_t g_now[MOST_DEVICES], g_peak[MOST_DEVICES];

void free_device(void* context) {
  if (!context) return;
  MemoryP memory = std::move(*handle(context));
  delete handle(context);
  memory->freed = here("free");
  std::lock_guard<std::mutex> lock(g_blocks_mutex);
  g_now[memory->device] -= memory->bytes;
  freed()[memory->owner].push_back(std::move(memory));
}

// The block stays as long as copies from and to it are queued; as of CUDA's host allocator nobody else gets it before.
void free_pinned(void* context) {
  if (!context) return;
  {
    std::lock_guard<std::mutex> lock(g_blocks_mutex);
    pins().erase((*handle(context))->data);
  }
  delete handle(context);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(current_device(), bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_stream(data, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& bytes = stats.allocated_bytes[0];
    bytes.current = allocated(device);
    bytes.peak = peak(device);
    stats.reserved_bytes[0] = stats.active_bytes[0] = bytes;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override { return {(size_t(80) << 30) - allocated(device), size_t(80) << 30}; }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, c10::Device(c10::kCPU)};
    auto memory = std::make_shared<Memory>(bytes, true);
    auto* data = memory->data;
    std::lock_guard<std::mutex> lock(g_blocks_mutex);
    pins()[data] = bytes;
    return {data, new MemoryP(std::move(memory)), &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

}  // namespace

c10::Allocator* device_allocator() { static auto* one = new DeviceAllocator; return one; }
c10::Allocator* pinned_allocator() { static auto* one = new PinnedAllocator; return one; }

c10::DataPtr allocate_on(int device, size_t bytes) {
  c10::Device where(CUDA, device);
  if (!bytes) return {nullptr, nullptr, &free_device, where};
  auto& queue = current_queue(device);
  auto memory = std::make_shared<Memory>(bytes, false);
  memory->device = device;
  memory->owner = queue.actor;
  std::vector<MemoryP> given_away;
  {
    std::lock_guard<std::mutex> lock(g_blocks_mutex);
    given_away.swap(freed()[queue.actor]);
    g_now[device] += bytes;
    g_peak[device] = std::max(g_peak[device], g_now[device]);
  }
  auto* data = memory->data;
  c10::DataPtr owned(data, new MemoryP(std::move(memory)), &free_device, where);
  if (!given_away.empty()) check_reuse(queue.seen(), given_away, here("an allocation"));
  return owned;
}

MemoryP memory_of(const c10::DataPtr& data) {
  bool ours = data.get_deleter() == &free_device || data.get_deleter() == &free_pinned;
  return ours && data.get_context() ? *handle(data.get_context()) : nullptr;
}

bool is_pinned(const void* pointer) {
  auto* data = static_cast<const char*>(pointer);
  std::lock_guard<std::mutex> lock(g_blocks_mutex);
  auto next = pins().upper_bound(data);
  if (next == pins().begin()) return false;
  --next;
  return data < next->first + next->second;
}

void record_stream(const c10::DataPtr& data, const c10::Stream& stream) {
  if (!data.get_context()) return;
  auto actor = queue_of(stream).actor;
  std::lock_guard<std::mutex> lock(order_mutex());
  (*handle(data.get_context()))->recorded.insert(actor);
}

Use use_of(const at::Tensor& tensor, bool write) {
  auto memory = memory_of(tensor.storage().data_ptr());
  if (!memory || tensor.numel() == 0) return {nullptr, 0, 0, write};
  size_t elements = 1;
  for (int64_t i = 0; i < tensor.dim(); i++) elements += (tensor.size(i) - 1) * tensor.stride(i);
  size_t begin = tensor.storage_offset() * tensor.itemsize();
  return {memory, begin, begin + elements * tensor.itemsize(), write};
}

size_t allocated(int device) { std::lock_guard<std::mutex> lock(g_blocks_mutex); return g_now[device]; }
size_t peak(int device) { std::lock_guard<std::mutex> lock(g_blocks_mutex); return g_peak[device]; }
void reset_peak(int device) { std::lock_guard<std::mutex> lock(g_blocks_mutex); g_peak[device] = g_now[device]; }

// ---------------------------------------------------------------- the host and pinned memory

void host_uses(const at::Tensor& tensor, bool write, const std::string& what) {
  if (!tensor.has_storage() || !tensor.device().is_cpu() || !is_pinned(tensor)) return;
  auto use = use_of(tensor, write);
  if (use.memory) check_host({use}, here(what + " on the host"));  // an empty shard has none
}

namespace {
template <class F>
void each(const c10::IValue& value, F visit) {
  if (value.isTensor() && value.toTensor().defined()) visit(value.toTensor());
  else if (value.isTensorList()) for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  else if (value.isOptionalTensorList())
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) if (tensor && tensor->defined()) visit(*tensor);
}

bool ends_with(const std::string& text, const std::string& end) { return text.size() >= end.size() && text.substr(text.size() - end.size()) == end; }

std::unique_ptr<at::ObserverContext> look(const at::RecordFunction& call) {
  auto schema = call.operator_schema();
  if (on_a_stream() || !schema) return nullptr;
  auto inputs = call.inputs();
  bool device = false, pinned = false;
  for (const auto& input : inputs) {
    device = device || (input.isDevice() && input.toDevice().type() == CUDA);  // `to` a device
    each(input, [&](const at::Tensor& tensor) {
      device = device || tensor.device().type() == CUDA;
      pinned = pinned || (tensor.has_storage() && tensor.device().is_cpu() && is_pinned(tensor));
    });
  }
  // Copies between host and device are checked where they are made.
  if (device || !pinned) return nullptr;
  const auto& name = schema->name();
  // What takes only the shape. What returns a view reads nothing yet.
  if (ends_with(name, "_like") || name.rfind("aten::new_", 0) == 0 || ends_with(name, "is_pinned")) return nullptr;
  for (const auto& result : schema->returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return nullptr;
  for (size_t i = 0; i < inputs.size() && i < schema->arguments().size(); i++) {
    auto* alias = schema->arguments()[i].alias_info();
    each(inputs[i], [&](const at::Tensor& tensor) {
      try {
        host_uses(tensor, alias && alias->isWrite(), name);
      } catch (...) {
        keep_error(std::current_exception());  // torch swallows the error of an observer
      }
    });
  }
  return nullptr;
}
}  // namespace

void watch_host() { at::addGlobalCallback(at::RecordFunctionCallback(&look).needsInputs(true).scopes({at::RecordScope::FUNCTION})); }

}  // namespace sim
