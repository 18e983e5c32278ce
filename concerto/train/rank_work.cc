#include "concerto/train/rank_work.h"

#include <algorithm>

#include "concerto/base/part.h"
#include "concerto/checkpoint/store_tensors.h"
#include "concerto/train/step_engine.h"

namespace concerto {

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
  const int64_t rows = std::min(t.micro_batch_size, t.global_batch_size);
  const Part dealt = dealt_micro_batches(micro_batches_of(c), sizes.dp, place.dp);
  for (int64_t m = dealt.begin; m < dealt.end(); ++m)
    w.micro_batches.push_back(std::min(rows, t.global_batch_size - m * rows) * t.seq_length);
  w.micro_batches.resize(
      static_cast<size_t>(schedule.micro_batches));  // empty ones, up to those of the first data rank
  const BalanceLoss balance = balance_loss(c.model.config, routing_options(c));
  if (balance != BalanceLoss::kPerLayer && c.model.config.num_moe_layers() > 0)
    w.pooled_units = t.routing_unit == RoutingUnit::kSequence ? rows : 1;
  w.trains_pool = balance == BalanceLoss::kPooled;
  return w;
}

}  // namespace concerto
