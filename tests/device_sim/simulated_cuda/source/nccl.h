// Collectives on the device: on a stream of their own, or for a call that is not asynchronous on the caller's. Gloo moves the bytes.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "kernels.h"

namespace sim {

class Communicator final : public c10d::Backend {
 public:
  using Tensor = at::Tensor;
  using Tensors = std::vector<Tensor>;
  using WorkP = c10::intrusive_ptr<c10d::Work>;
  // What it does on gloo, with what it reads and what it writes.
  using Body = std::function<void(c10d::Backend& gloo, Tensors& in, Tensors& out)>;

  // `as` is `nccl`, or `gloo` for tensors of the device in a group of gloo.
  Communicator(c10::intrusive_ptr<c10d::Backend> gloo, std::string as);
  void bind(int device) { device_ = device; }

  const std::string getBackendName() const override { return as_; }
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return false; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void eagerConnectSingleDevice(at::Device device) override { bind(device.index()); }
  void abort() override;
  void startCoalescing() override { batch_.clear(); batching_ = true; }
  WorkP endCoalescing() override;

  WorkP broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkP allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkP allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkP reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkP allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override;
  WorkP _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override;
  WorkP allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override;
  WorkP reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& options) override;
  WorkP _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override;
  WorkP reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) override;
  WorkP gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) override;
  WorkP scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override;
  WorkP alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                      const c10d::AllToAllOptions& options) override;
  WorkP send(Tensors& tensors, int to, int tag) override;
  WorkP recv(Tensors& tensors, int from, int tag) override;
  WorkP barrier(const c10d::BarrierOptions& options) override;

 private:
  class Pending;
  WorkP collective(c10d::OpType type, const Tensors& in, const Tensors& out, bool async, Body body);
  WorkP merged(const std::vector<WorkP>& works);
  void check(const Tensor& tensor);

  c10::intrusive_ptr<c10d::Backend> gloo_;
  const std::string as_;
  int device_ = -1;
  std::optional<c10::Stream> stream_;
  std::optional<Moment> last_;  // NCCL runs the collectives of a communicator one after the other
  bool batching_ = false;
  std::vector<WorkP> batch_;
  std::shared_ptr<std::atomic<bool>> aborted_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace sim
