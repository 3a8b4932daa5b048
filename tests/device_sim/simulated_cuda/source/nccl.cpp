#include "nccl.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <cstdio>
#include <thread>

#include "counts.h"

namespace sim {

using Tensor = at::Tensor;
using Tensors = Communicator::Tensors;
using WorkP = Communicator::WorkP;

// ---------------------------------------------------------------- what a collective returns

// Tensors in use by a collective.
class Held {
 public:
  explicit Held(Tensors tensors) : tensors_(std::move(tensors)) {}
  Tensors take() { std::lock_guard<std::mutex> lock(mutex_); return std::exchange(tensors_, {}); }

 private:
  std::mutex mutex_;
  Tensors tensors_;
};
using HeldP = std::shared_ptr<Held>;

// Holds the tensors until the waiting stream is ordered behind the collective, as ProcessGroupNCCL does instead of `record_stream`.
class Communicator::Pending final : public c10d::Work {
 public:
  Pending(c10d::OpType type, int device, Tensors out, HeldP held)
      : Work(-1, type), device_(device), out_(std::move(out)), held_{std::move(held)}, blocks_(type == c10d::OpType::BARRIER) {}

  void over(const Moment& moment, const c10::Stream& stream) {
    moment_ = moment;
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<c10::Device>{c10::Device(CUDA, device_)});
    c10::StreamGuard guard(stream);
    future_->markCompleted(c10::IValue(out_));
  }
  void take(Pending& other) { held_.insert(held_.end(), other.held_.begin(), other.held_.end()); }

  bool isCompleted() override { return is_over(*moment_); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (blocks_) wait_on_host(*moment_);
    return true;
  }
  void synchronize() override {
    wait_on_stream(current_queue(device_), *moment_);
    for (auto& tensors : held_) tensors->take();
    held_.clear();
  }
  void blockCurrentStream() override { synchronize(); }
  Tensors result() override { return out_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  int device_;
  Tensors out_;
  std::vector<HeldP> held_;
  bool blocks_;
  std::optional<Moment> moment_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// ---------------------------------------------------------------- one collective

Communicator::Communicator(c10::intrusive_ptr<c10d::Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

void Communicator::check(const Tensor& tensor) {
  TORCH_CHECK(on_device(tensor) && tensor.layout() == at::kStrided, "Tensors must be CUDA and dense (NCCL got one on ", tensor.device(), ")");
  TORCH_CHECK(tensor.is_contiguous(tensor.suggest_memory_format()), "Tensors must be contiguous");
  TORCH_CHECK(device_ < 0 || device_ == tensor.device().index(), "NCCL: a tensor on cuda:", tensor.device().index(),
              ", the communicator is on cuda:", device_);
  device_ = tensor.device().index();
}

// A peer that is gone leaves a kernel of NCCL waiting, until the communicator is aborted.
static void wait_for_abort(const std::atomic<bool>& aborted, const char* why) {
  std::fprintf(stderr, "simulated NCCL: a collective waits for a peer that does not answer: %s\n", why);
  while (!aborted) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  TORCH_CHECK(false, "NCCL communicator was aborted");
}

WorkP Communicator::collective(c10d::OpType type, const Tensors& in, const Tensors& out, bool async, Body body) {
  auto all = in;
  all.insert(all.end(), out.begin(), out.end());
  auto held = std::make_shared<Held>(all);
  std::vector<Use> uses;
  for (const auto& tensor : in) check(tensor), uses.push_back(use_of(tensor, false));
  for (const auto& tensor : out) check(tensor), uses.push_back(use_of(tensor, true));
  int device = device_ < 0 ? current_device() : device_;
  if (!stream_) stream_ = new_stream(device);
  auto stream = async ? *stream_ : current_stream(device);
  auto& queue = queue_of(stream);
  auto name = "NCCL " + c10d::opTypeToString(type);
  if (async) wait_on_stream(queue, moment_of(current_queue(device)));
  if (last_ && last_->queue != &queue && !last_->queue->done(last_->number)) {
    auto before = *last_;
    queue.push([before] { before.queue->wait(before.number); });
  }
  count(name);
  launch(queue, uses, name, [gloo = gloo_, body = std::move(body), from = host_views(in), to = host_views(out), aborted = aborted_]() mutable {
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    try {
      body(*gloo, from, to);
    } catch (const std::exception& error) {
      wait_for_abort(*aborted, error.what());
    }
  });
  last_ = moment_of(queue);
  // Nobody may wait for it: then the watchdog lets go of the tensors once it is done.
  queue.push([held, stream] {
    for (auto& tensor : held->take()) record_stream(tensor.storage().data_ptr(), stream);
  });
  auto work = c10::make_intrusive<Pending>(type, device, out, held);
  work->over(*last_, stream);
  if (!async && type != c10d::OpType::BARRIER) work->synchronize();
  if (batching_) batch_.push_back(work);
  return work;
}

WorkP Communicator::merged(const std::vector<WorkP>& works) {
  if (works.empty()) return nullptr;
  auto* last = static_cast<Pending*>(works.back().get());
  for (const auto& work : works)
    if (work.get() != last) last->take(*static_cast<Pending*>(work.get()));
  return works.back();
}

WorkP Communicator::endCoalescing() {
  batching_ = false;
  return merged(batch_);
}

void Communicator::abort() { *aborted_ = true; }

// ---------------------------------------------------------------- the collectives on gloo, which does not average or multiply

static void reduced(const c10d::ReduceOp& op, int world, Tensors& tensors, const std::function<void(const c10d::ReduceOp&)>& sum) {
  bool average = op.op_ == c10d::ReduceOp::AVG, scaled = op.op_ == c10d::ReduceOp::PREMUL_SUM;
  if (scaled) {
    auto* by = static_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
    bool tensor = by->tensor_factor.defined();
    for (auto& each : tensors) tensor ? each.mul_(on_device(by->tensor_factor) ? host_view(by->tensor_factor) : by->tensor_factor) : each.mul_(by->double_factor);
  }
  sum(average || scaled ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op);
  if (average)
    for (auto& each : tensors) each.div_(world);
}

static void reduce_all(c10d::Backend& gloo, Tensors& tensors, const c10d::ReduceOp& op) {
  reduced(op, gloo.getSize(), tensors, [&](const c10d::ReduceOp& plain) {
    c10d::AllreduceOptions options;
    options.reduceOp = plain;
    gloo.allreduce(tensors, options)->wait();
  });
}

// Gloo writes while it reads, and takes tensors apart that overlap: what is read is copied.
static Tensors copies(const Tensors& tensors) {
  Tensors made;
  for (const auto& tensor : tensors) made.push_back(tensor.clone());
  return made;
}

static Tensors flattened(const std::vector<Tensors>& lists) {
  TORCH_CHECK(lists.size() <= 1, "one device for each process");
  return lists.empty() ? Tensors{} : lists[0];
}

WorkP Communicator::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return collective(c10d::OpType::BROADCAST, {}, tensors, options.asyncOp,
                    [options](auto& gloo, auto&, auto& out) { gloo.broadcast(out, options)->wait(); });
}

WorkP Communicator::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return collective(c10d::OpType::ALLREDUCE, {}, tensors, options.asyncOp,
                    [op = options.reduceOp](auto& gloo, auto&, auto& out) { reduce_all(gloo, out, op); });
}

WorkP Communicator::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  std::vector<WorkP> works;
  for (auto& tensor : tensors) {
    Tensors one{tensor};
    works.push_back(allreduce(one, options));
  }
  return merged(works);
}

WorkP Communicator::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return collective(c10d::OpType::REDUCE, {}, tensors, options.asyncOp, [options](auto& gloo, auto&, auto& out) {
    auto sums = copies(out);
    reduce_all(gloo, sums, options.reduceOp);
    if (options.rootRank == gloo.getRank()) out[0].copy_(sums[0]);
  });
}

WorkP Communicator::allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) {
  return collective(c10d::OpType::ALLGATHER, in, flattened(out), options.asyncOp, [](auto& gloo, auto& from, auto& to) {
    auto sent = copies(from);
    std::vector<Tensors> lists{to};
    gloo.allgather(lists, sent)->wait();
  });
}

WorkP Communicator::_allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) {
  TORCH_CHECK(out.dtype() == in.dtype(), "output tensor must have the same type as input tensor");
  TORCH_CHECK(out.numel() == in.numel() * getSize(), "output tensor size must be equal to world_size times input tensor size");
  return collective(c10d::OpType::_ALLGATHER_BASE, {in}, {out}, options.asyncOp, [](auto& gloo, auto& from, auto& to) {
    auto sent = from[0].clone();
    gloo._allgather_base(to[0], sent)->wait();
  });
}

WorkP Communicator::allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) {
  std::vector<WorkP> works;
  for (size_t i = 0; i < in.size(); i++) works.push_back(_allgather_base(out[i], in[i], options));
  return merged(works);
}

WorkP Communicator::_reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK(out.dtype() == in.dtype(), "input tensor must be the same type as the output tensor");
  TORCH_CHECK(in.numel() == out.numel() * getSize(), "input tensor must be the same size as output size times world size");
  return collective(c10d::OpType::_REDUCE_SCATTER_BASE, {in}, {out}, options.asyncOp, [op = options.reduceOp](auto& gloo, auto& from, auto& to) {
    auto sums = copies(from);
    reduce_all(gloo, sums, op);
    auto size = to[0].numel();
    to[0].view({-1}).copy_(sums[0].view({-1}).narrow(0, gloo.getRank() * size, size));
  });
}

WorkP Communicator::reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) {
  std::vector<WorkP> works;
  for (size_t i = 0; i < in.size(); i++) works.push_back(_reduce_scatter_base(out[i], in[i], options));
  return merged(works);
}

WorkP Communicator::reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& options) {
  return collective(c10d::OpType::REDUCE_SCATTER, flattened(in), out, options.asyncOp, [op = options.reduceOp](auto& gloo, auto& from, auto& to) {
    auto sums = copies(from);
    for (auto& sum : sums) {
      Tensors one{sum};
      reduce_all(gloo, one, op);
    }
    to[0].copy_(sums[gloo.getRank()].view(to[0].sizes()));
  });
}

WorkP Communicator::gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) {
  return collective(c10d::OpType::GATHER, in, flattened(out), options.asyncOp, [options](auto& gloo, auto& from, auto& to) {
    auto sent = copies(from);
    std::vector<Tensors> lists;
    if (gloo.getRank() == options.rootRank) lists.push_back(to);
    gloo.gather(lists, sent, options)->wait();
  });
}

WorkP Communicator::scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) {
  return collective(c10d::OpType::SCATTER, flattened(in), out, options.asyncOp, [options](auto& gloo, auto& from, auto& to) {
    std::vector<Tensors> lists;
    if (gloo.getRank() == options.rootRank) lists.push_back(copies(from));
    gloo.scatter(to, lists, options)->wait();
  });
}

WorkP Communicator::alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                                  const c10d::AllToAllOptions& options) {
  return collective(c10d::OpType::ALLTOALL_BASE, {in}, {out}, options.asyncOp,
                    [out_sizes, in_sizes](auto& gloo, auto& from, auto& to) mutable { gloo.alltoall_base(to[0], from[0], out_sizes, in_sizes)->wait(); });
}

WorkP Communicator::send(Tensors& tensors, int to, int tag) {
  return collective(c10d::OpType::SEND, tensors, {}, true, [to, tag](auto& gloo, auto& from, auto&) { gloo.send(from, to, tag)->wait(); });
}

WorkP Communicator::recv(Tensors& tensors, int from, int tag) {
  return collective(c10d::OpType::RECV, {}, tensors, true, [from, tag](auto& gloo, auto&, auto& out) { gloo.recv(out, from, tag)->wait(); });
}

WorkP Communicator::barrier(const c10d::BarrierOptions&) {
  return collective(c10d::OpType::BARRIER, {}, {}, false, [](auto& gloo, auto&, auto&) {
    Tensors one{at::zeros({1})};
    gloo.allreduce(one)->wait();
  });
}

// ---------------------------------------------------------------- DDP

// DDP times its first steps with events of its own.
struct NoTimer final : c10d::Timer {
  explicit NoTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

}  // namespace sim

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, sim::NoTimer)
}
