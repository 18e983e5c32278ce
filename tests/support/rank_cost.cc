#include "tests/support/rank_cost.h"

#include <algorithm>
#include <map>

#include "concerto/base/part.h"
#include "concerto/checkpoint/store_tensors.h"
#include "concerto/params/parameter_store.h"
#include "concerto/train/step_engine.h"

namespace concerto::test {
namespace {

thread_local double flops_here = 0;
const Backend* counted = nullptr;  // whose kernels do the work

void count(const Context& ctx, int64_t rows, View w) {
  if (!ctx.dry_run)
    flops_here += 2.0 * static_cast<double>(rows * w.shape[w.shape.rank() - 1] * w.shape[w.shape.rank() - 2]);
}
int64_t routed(const Context& ctx, View offsets) { return ctx.dry_run ? 0 : offsets.as<int32_t>()[offsets.dim(0) - 1]; }

LinearKernels counting(LinearKernels k) {
  k.forward = [](const Context& ctx, const LinearForward& a) {
    count(ctx, a.x.rows(), a.w);
    counted->linear.forward(ctx, a);
  };
  k.backward_input = [](const Context& ctx, const LinearBackwardInput& a) {
    count(ctx, a.dy.rows(), a.w);
    counted->linear.backward_input(ctx, a);
  };
  k.backward_weight = [](const Context& ctx, const LinearBackwardWeight& a) {
    count(ctx, a.dy.rows(), a.dw);
    counted->linear.backward_weight(ctx, a);
  };
  return k;
}

GroupedLinearKernels counting(GroupedLinearKernels k) {
  k.forward = [](const Context& ctx, const GroupedLinearForward& a) {
    count(ctx, routed(ctx, a.offsets), a.w);
    counted->grouped_linear.forward(ctx, a);
  };
  k.backward_input = [](const Context& ctx, const GroupedLinearBackwardInput& a) {
    count(ctx, routed(ctx, a.offsets), a.w);
    counted->grouped_linear.backward_input(ctx, a);
  };
  k.backward_weight = [](const Context& ctx, const GroupedLinearBackwardWeight& a) {
    count(ctx, routed(ctx, a.offsets), a.dw);
    counted->grouped_linear.backward_weight(ctx, a);
  };
  return k;
}

RouterKernels counting(RouterKernels k) {
  k.logits = [](const Context& ctx, const RouterLogits& a) {
    count(ctx, a.x.rows(), a.w);
    counted->router.logits(ctx, a);
  };
  k.logits_backward_input = [](const Context& ctx, const RouterLogitsBackwardInput& a) {
    count(ctx, a.dlogits.rows(), a.w);
    counted->router.logits_backward_input(ctx, a);
  };
  k.logits_backward_weight = [](const Context& ctx, const RouterLogitsBackwardWeight& a) {
    count(ctx, a.dlogits.rows(), a.dw);
    counted->router.logits_backward_weight(ctx, a);
  };
  return k;
}

// From the first byte to the last of all views of a kind, and to the end of the last 64 elements, as stores round up.
class Extent {
 public:
  void add(View v) {
    if (!v) return;
    const char* const begin = static_cast<const char*>(v.data);
    begin_ = begin_ ? std::min(begin_, begin) : begin;
    end_ = std::max(end_, begin + v.bytes());
    unit_ = 64 * dtype_bytes(v.dtype);
  }
  int64_t bytes() const { return (end_ - begin_ + unit_ - 1) / unit_ * unit_; }

 private:
  int64_t unit_ = 1;
  const char *begin_ = nullptr, *end_ = nullptr;
};

// Rows of a rank's own tokens for each expert [E], over its MoE layers in the step.
std::vector<double> sent_rows(const ModelConfig& c, const std::vector<StageSpan>& stages, const MeshSizes& sizes,
                              const MeshPlace& place, std::span<const MicroBatch> step, const Choices& choices) {
  std::vector<double> rows(static_cast<size_t>(c.moe_num_experts));
  const Part dealt = dealt_micro_batches(static_cast<int64_t>(step.size()), sizes.dp, place.dp);
  for (const StageSpan& span : stages)
    for (int64_t layer = span.first_layer; layer < span.last_layer; ++layer) {
      if (!c.is_moe_layer(layer)) continue;
      const std::vector<int>& experts = choices.at(static_cast<int>(layer));
      int64_t first = 0;  // token of the step
      for (int64_t m = 0; m < static_cast<int64_t>(step.size()); ++m) {
        const int64_t tokens = step[static_cast<size_t>(m)].tokens();
        const Part own = part_of(tokens, sizes.tp, place.tp);
        if (m >= dealt.begin && m < dealt.end())
          for (int64_t i = (first + own.begin) * c.moe_k; i < (first + own.end()) * c.moe_k; ++i)
            if (experts.at(static_cast<size_t>(i)) >= 0) ++rows[static_cast<size_t>(experts[static_cast<size_t>(i)])];
        first += tokens;
      }
    }
  return rows;
}

}  // namespace

const Backend& counting_backend(const Backend& backend) {
  static const Backend wrapped = [&] {
    counted = &backend;
    Backend b = backend;
    b.linear = counting(b.linear);
    b.grouped_linear = counting(b.grouped_linear);
    b.router = counting(b.router);
    return b;
  }();
  CHECK(counted == &backend, "one backend at a time");
  return wrapped;
}

double counted_flops() { return flops_here; }

void measure_store(const ParameterStore& store, LayoutCost& cost) {
  Extent weights, copies, gradients, moments1, moments2;
  std::map<int, Extent> layers;  // ZeRO-2: working memory, which decoder layers take in turn
  for (int i = 0; i < store.size(); ++i) {
    weights.add(store.master(i));
    copies.add(store.copy(i));
    const bool working = store.gradients_of() == GradientsOf::kUpdated;
    if (working) layers[store.layer_of(i)].add(store.working_gradient(i));
    if (!working || store.updates(i)) gradients.add(store.gradient(i));
    if (!store.updates(i)) continue;
    moments1.add(store.moment1(i));
    moments2.add(store.moment2(i));
  }
  cost.weight_bytes = weights.bytes();
  cost.copy_bytes = copies.bytes();
  cost.gradient_bytes = gradients.bytes();
  int64_t most = 0;
  for (auto& [layer, extent] : layers)
    if (layer == kOutsideLayers)
      cost.gradient_bytes += extent.bytes();
    else
      most = std::max(most, extent.bytes());
  cost.gradient_bytes += most;
  cost.moment_bytes = moments1.bytes() + moments2.bytes();
}

void measure_traffic(const RankGroups& groups, LayoutCost& cost) {
  if (const Communicator* tp = groups.tp()) {
    cost.tp_gather_bytes = tp->traffic().all_gather;
    cost.tp_reduce_scatter_bytes = tp->traffic().reduce_scatter;
  }
  if (const Communicator* dispatch = groups.dispatch()) cost.dispatch_bytes = dispatch->traffic().all_to_all;
  for (const RankGroups::PipelineChannel& channel : groups.pp())
    cost.pipeline_bytes += channel.forward->traffic().send + channel.backward->traffic().send;
  for (const Replicas kind : kReplicaKinds)
    if (const Communicator* group = groups.replicas(kind)) {
      cost.reduce_to_owners_bytes += group->traffic().reduce_to_owners;
      cost.broadcast_bytes += group->traffic().broadcast_from_owners;
    }
}

LayoutCost expected_cost(const RunConfig& config, const MeshSizes& sizes, const RankCost& rank,
                         const PipelineSchedule& schedule, std::span<const MicroBatch> step, const Choices& choices) {
  const ModelConfig& c = config.model.config;
  RankWork w{.plan = rank.plan,
             .dp = sizes.dp,
             .dp_rank = rank.place.dp,
             .pp = sizes.pp,
             .pp_rank = rank.place.pp,
             .v_shape = schedule.v_shape,
             .compute = compute_dtype(config.training.dtype),
             .zero = static_cast<int>(config.parallel.zero),
             .recompute = config.parallel.recompute,
             .global_routing = config.training.routing_unit == RoutingUnit::kGlobal};
  const Part dealt = dealt_micro_batches(static_cast<int64_t>(step.size()), sizes.dp, rank.place.dp);
  w.micro_batches.resize(static_cast<size_t>(schedule.micro_batches));
  for (int64_t m = 0; m < dealt.count; ++m)
    w.micro_batches[static_cast<size_t>(m)] = step[static_cast<size_t>(dealt.begin + m)].tokens();
  const BalanceLoss balance = balance_loss(c, routing_options(config));
  w.trains_pool = balance == BalanceLoss::kPooled;
  if (c.num_moe_layers() > 0 && balance != BalanceLoss::kPerLayer)
    w.pooled_units = config.training.routing_unit == RoutingUnit::kSequence ? config.training.micro_batch_size : 1;
  if (!choices.empty() && c.num_moe_layers() > 0) {
    w.sent_rows = sent_rows(c, rank.plan.stages, sizes, rank.place, step, choices);
    const Mesh mesh(sizes);
    for (int ep = 0; ep < sizes.ep; ++ep)
      for (int etp = 0; etp < sizes.etp; ++etp) {
        const MeshPlace sender = mesh.place(mesh.expert_rank(rank.place.pp, rank.place.edp, ep, etp));
        const auto rows = sent_rows(c, rank.plan.stages, sizes, sender, step, choices);
        double here = 0;
        for (const int e : local_experts(c, rank.plan, rank.plan.ep_rank)) here += rows[static_cast<size_t>(e)];
        w.received_rows.push_back(here);
      }
  }
  return layout_cost(c, w);
}

}  // namespace concerto::test
