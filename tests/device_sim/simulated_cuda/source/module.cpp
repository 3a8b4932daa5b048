// What the Python side calls; importing it makes this process one with a CUDA device.
#include <torch/csrc/utils/pybind.h>

#include "counts.h"
#include "device.h"
#include "nccl.h"

using namespace sim;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("install", [](int devices, int patience_ms) {
    state().devices = devices;
    state().patience_ms = patience_ms;
    c10::SetAllocator(CUDA, device_allocator(), 1);
    install_hooks();
    watch_host();
    return has_hooks();
  });
  module.def("device_count", [] { return state().devices; });
  module.def("set_device_count", [](int devices) { state().devices = devices; });
  module.def("get_device", &current_device);
  module.def("set_device", &set_current_device);
  module.def("exchange_device", &exchange_device);
  module.def("in_bad_fork", &in_bad_fork);
  module.def("synchronize", [] { count("waits: device synchronize"); synchronize_device(); });
  module.def("end_streams", [] { end_streams(std::chrono::seconds(2)); });
  module.def("get_sync_mode", [] { return state().sync_mode; });
  module.def("set_sync_mode", [](int mode) { state().sync_mode = mode; });
  module.def("default_generators", [] {
    std::vector<at::Generator> all;
    for (int i = 0; i < state().devices; i++) all.push_back(default_generator(i));
    return all;
  });
  module.def("allocated", &allocated);
  module.def("peak", &peak);
  module.def("reset_peak", &reset_peak);
  module.def("resize_storage", [](const at::Tensor& tensor, int64_t bytes) { resize_storage(tensor.storage().unsafeGetStorageImpl(), bytes); });
  module.def("host_reads", [](const at::Tensor& tensor, const std::string& what) { host_uses(tensor, false, what); });
  module.def("races", &races);
  module.def("counts", &counts);
  module.def("reset_counts", &reset_counts);
  py::class_<Communicator, c10d::Backend, c10::intrusive_ptr<Communicator>>(module, "Communicator", py::dynamic_attr())
      .def(py::init([](const c10::intrusive_ptr<c10d::Backend>& gloo, const std::string& as) { return c10::make_intrusive<Communicator>(gloo, as); }))
      .def("bind", &Communicator::bind)
      .def("abort", &Communicator::abort);
}
