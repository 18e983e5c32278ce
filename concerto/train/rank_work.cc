#include "concerto/train/rank_work.h"

#include <algorithm>

#include "concerto/base/part.h"
#include "concerto/checkpoint/store_tensors.h"
#include "concerto/train/step_engine.h"

namespace concerto {

namespace {

// Of each micro-batch that a data rank plays; empty ones up to those of the first.
std::vector<int64_t> micro_batch_tokens(const RunConfig& c, const MeshSizes& sizes, int dp_rank,
                                        const PipelineSchedule& schedule) {
  const TrainingSection& t = c.training;
  const int64_t rows = std::min(t.micro_batch_size, t.global_batch_size);
  const Part dealt = dealt_micro_batches(micro_batches(c.training), sizes.dp, dp_rank);
  std::vector<int64_t> tokens;
  for (int64_t m = dealt.begin; m < dealt.end(); ++m)
    tokens.push_back(std::min(rows, t.global_batch_size - m * rows) * t.seq_length);
  tokens.resize(static_cast<size_t>(schedule.micro_batches));
  return tokens;
}

// From each rank of the dispatch group, with even loads.
std::vector<double> even_received_rows(const RunConfig& c, const Mesh& mesh, const MeshPlace& place,
                                       const PipelineSchedule& schedule, const ShardPlan& plan) {
  const ModelConfig& m = c.model.config;
  int64_t layers = 0;
  for (const StageSpan& s : plan.stages)
    for (int64_t i = s.first_layer; i < s.last_layer; ++i) layers += m.is_moe_layer(i);
  std::vector<double> rows;
  if (layers == 0) return rows;
  const auto local = static_cast<double>(local_experts(m, plan, plan.ep_rank).size());
  const double share = static_cast<double>(m.moe_k * layers) * local / static_cast<double>(m.moe_num_experts);
  for (int ep = 0; ep < mesh.sizes().ep; ++ep)
    for (int etp = 0; etp < mesh.sizes().etp; ++etp) {
      const MeshPlace sender = mesh.place(mesh.expert_rank(place.pp, place.edp, ep, etp));
      int64_t own = 0;
      for (const int64_t tokens : micro_batch_tokens(c, mesh.sizes(), sender.dp, schedule))
        own += part_of(tokens, mesh.sizes().tp, sender.tp).count;
      rows.push_back(share * static_cast<double>(own));
    }
  return rows;
}

}  // namespace

RankWork rank_work(const RunConfig& c, const MeshSizes& sizes, const MeshPlace& place, const PipelineSchedule& schedule,
                   bool packs) {
  const TrainingSection& t = c.training;
  RankWork w{.plan = shard_plan(c, sizes, place, schedule),
             .dp = sizes.dp,
             .dp_rank = place.dp,
             .pp = sizes.pp,
             .pp_rank = place.pp,
             .v_shape = schedule.v_shape,
             .compute = compute_dtype(t.dtype),
             .moments = compute_dtype(c.optimizer.moments_dtype),
             .packs = packs && t.dtype == "bf16",
             .zero = static_cast<int>(c.parallel.zero),
             .bf16_gradients = c.parallel.grad_wire == "bf16",
             .recompute = c.parallel.recompute,
             .global_routing = t.routing_unit == RoutingUnit::kGlobal};
  w.micro_batches = micro_batch_tokens(c, sizes, place.dp, schedule);
  w.received_rows = even_received_rows(c, Mesh(sizes), place, schedule, w.plan);
  const BalanceLoss balance = balance_loss(c.model.config, routing_options(c));
  if (balance != BalanceLoss::kPerLayer && c.model.config.num_moe_layers() > 0)
    w.pooled_units = t.routing_unit == RoutingUnit::kSequence ? std::min(t.micro_batch_size, t.global_batch_size) : 1;
  w.trains_pool = balance == BalanceLoss::kPooled;
  return w;
}

}  // namespace concerto
