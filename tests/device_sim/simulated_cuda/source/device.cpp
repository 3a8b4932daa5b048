#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <random>

#include "counts.h"

namespace sim {
namespace {

int index_of(c10::Device device) { return device.index() < 0 ? current_device() : device.index(); }
Moment* moment(void* event) { return static_cast<Moment*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override { return {CUDA, static_cast<c10::DeviceIndex>(exchange_device(device.index()))}; }
  c10::Device getDevice() const override { return {CUDA, static_cast<c10::DeviceIndex>(current_device())}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchange_device(device.index()); }
  c10::DeviceIndex deviceCount() const noexcept override { return state().devices; }
  c10::Stream getStream(c10::Device device) const override { return current_stream(index_of(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(CUDA, index_of(device)), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return new_stream(index_of(device)); }
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(index_of(device)); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current_stream(stream.device_index());
    set_current_stream(stream);
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream& stream) const override { return is_over(moment_of(queue_of(stream))); }
  void synchronizeStream(const c10::Stream& stream) const override {
    start_synchronizing("stream synchronize");
    synchronize_stream(queue_of(stream));
  }
  // As on CUDA, only the waits of copies, reads and streams count for set_sync_debug_mode.
  void synchronizeDevice(c10::DeviceIndex) const override { count("waits: device synchronize"); synchronize_device(); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, const c10::EventFlag flag) const override {
    auto now = moment_of(queue_of(stream), flag == c10::EventFlag::BACKEND_DEFAULT);
    if (*event) *moment(*event) = now;
    else *event = new Moment(now);
  }
  void block(void* event, const c10::Stream& stream) const override { if (event) wait_on_stream(queue_of(stream), *moment(event)); }
  bool queryEvent(void* event) const override { return !event || is_over(*moment(event)); }
  void synchronizeEvent(void* event) const override { count("waits: event synchronize"); if (event) wait_on_host(*moment(event)); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete moment(event); }
  double elapsedTime(void* start, void* end, c10::DeviceIndex) const override {
    TORCH_CHECK(moment(start)->at && moment(end)->at, "both events must be created with enable_timing=True");
    return std::chrono::duration<double, std::milli>(*moment(end)->at - *moment(start)->at).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override { record_stream(data, stream); }
};

// Its state is a seed and an offset, in the 16 bytes of CUDA's.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device) : GeneratorImpl(c10::Device(CUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  void set_current_seed(uint64_t seed) override { seed_ = seed; offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override { set_current_seed(std::random_device()()); return seed_; }
  void set_state(const c10::TensorImpl& given) override {
    TORCH_CHECK(given.device().is_cpu() && given.numel() == 16, "RNG state must be a torch.ByteTensor of 16 bytes");
    auto* words = static_cast<const uint64_t*>(given.data());
    seed_ = words[0];
    offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto bytes = at::detail::empty_cpu({16}, at::kByte);
    auto* words = static_cast<uint64_t*>(bytes.mutable_data_ptr());
    words[0] = seed_;
    words[1] = offset_;
    return bytes.getIntrusivePtr();
  }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  std::string showConfig() const override { return "simulated"; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return at::make_generator<Generator>(device < 0 ? current_device() : device); }
  c10::Device getDeviceFromPtr(void*) const override { return {CUDA, static_cast<c10::DeviceIndex>(current_device())}; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  c10::DeviceIndex deviceCount() const override { return state().devices; }
  int getNumGPUs() const override { return state().devices; }
  c10::DeviceIndex current_device() const override { return sim::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return sim::current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  void deviceSynchronize(c10::DeviceIndex) const override { synchronize_device(); }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

}  // namespace

const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < 16; i++) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return (*all)[device < 0 ? current_device() : device];
}

at::Generator drawn_from(const std::optional<at::Generator>& given, int device) {
  auto source = given && given->defined() ? *given : default_generator(device);
  TORCH_CHECK(source.device().type() == CUDA, "Expected a 'cuda' device type for generator but found 'cpu'");
  std::lock_guard<std::mutex> lock(source.mutex());
  auto seed = source.current_seed() * 0x9E3779B97F4A7C15ull + source.get_offset();
  source.set_offset(source.get_offset() + 4);
  return at::make_generator<at::CPUGeneratorImpl>(seed % 0x7fffffff);
}

// Private to torch: it asked for its CUDA hooks while it was imported, before this library could register any, and keeps the object that
// answers "no CUDA". Both classes hold nothing but their table of virtual functions, so that object gets the other table.
void install_hooks() {
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface) && sizeof(Hooks) == sizeof(void*));
  auto& kept = at::detail::getCUDAHooks();
  if (kept.hasCUDA()) return;
  static auto* ours = new Hooks;
  *reinterpret_cast<void**>(const_cast<at::CUDAHooksInterface*>(&kept)) = *reinterpret_cast<void**>(ours);
}
bool has_hooks() { return at::detail::getCUDAHooks().hasCUDA(); }

}  // namespace sim
