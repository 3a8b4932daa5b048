#include "nccl.h"

#include <ATen/core/LegacyTypeDispatch.h>
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
  Pending(c10d::OpType type, int device, Tensors out, HeldP held, bool blocks)
      : Work(-1, type), device_(device), out_(std::move(out)), held_{std::move(held)}, blocks_(blocks) {}

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

Communicator::Communicator(c10::intrusive_ptr<c10d::Backend> gloo, std::string as)
    : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), as_(std::move(as)) {}

void Communicator::check(const Tensor& tensor) {
  TORCH_CHECK(on_device(tensor) && tensor.layout() == at::kStrided, "Tensors must be CUDA and dense (", as_, " got one on ", tensor.device(), ")");
  TORCH_CHECK(tensor.is_contiguous(tensor.suggest_memory_format()), "Tensors must be contiguous");
  TORCH_CHECK(device_ < 0 || device_ == tensor.device().index(), as_, ": a tensor on cuda:", tensor.device().index(),
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
  auto name = as_ + " " + c10d::opTypeToString(type);
  bool is_nccl = as_ == "nccl", waits_on_host = !is_nccl || type == c10d::OpType::BARRIER;
  if (async) wait_on_stream(queue, moment_of(current_queue(device)));
  if (last_ && last_->queue != &queue && !last_->queue->done(last_->number)) {
    auto before = *last_;
    queue.push([before] { before.queue->wait(before.number); });
  }
  count(name);
  launch(queue, uses, name, [gloo = gloo_, body = std::move(body), from = host_views(in), to = host_views(out), aborted = aborted_, is_nccl]() mutable {
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    try {
      body(*gloo, from, to);
    } catch (const std::exception& error) {
      if (!is_nccl) throw;
      wait_for_abort(*aborted, error.what());
    }
  });
  last_ = moment_of(queue);
  // Nobody may wait for it: then the watchdog lets go of the tensors once it is done.
  queue.push([held, stream] {
    for (auto& tensor : held->take()) record_stream(tensor.storage().data_ptr(), stream);
  });
  auto work = c10::make_intrusive<Pending>(type, device, out, held, waits_on_host);
  work->over(*last_, stream);
  if (!async && !waits_on_host) work->synchronize();
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
