// The collectives on gloo, which does not average or multiply.
#include <ATen/ops/zeros.h>
#include <torch/headeronly/version.h>

#include "nccl.h"

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
namespace c10d {
using PreMulSumSupplement = NCCLPreMulSumSupplement;
}
#endif

namespace sim {

using Tensor = at::Tensor;
using Tensors = Communicator::Tensors;
using WorkP = Communicator::WorkP;

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

}  // namespace sim
