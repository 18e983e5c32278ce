#include <algorithm>

#include "concerto/ops/ref/kernels.h"

namespace concerto::ref {
namespace {

void make_plan(const Context& ctx, const MakeDispatchPlan& a) {
  ArenaScope arena(*ctx.scratch);
  const int64_t tokens = a.expert_ids.dim(0), k = a.expert_ids.dim(1), experts = a.offsets.dim(0) - 1;
  const View cursors = ctx.scratch->take({experts}, DType::kI32);
  if (ctx.dry_run) return;
  if (tokens) check_ids(a.expert_ids, experts, "plan.expert_ids");
  const auto* ids = a.expert_ids.as<int32_t>();
  auto *offsets = a.offsets.as<int32_t>(), *cursor = cursors.as<int32_t>();
  std::fill(offsets, offsets + experts + 1, 0);
  for (int64_t i = 0; i < tokens * k; ++i) ++offsets[ids[i] + 1];
  for (int64_t e = 0; e < experts; ++e) offsets[e + 1] += offsets[e];
  std::copy(offsets, offsets + experts, cursor);
  for (int64_t i = 0; i < tokens * k; ++i) {
    const int32_t row = cursor[ids[i]]++;
    a.row_of.as<int32_t>()[i] = row;
    a.row_token.as<int32_t>()[row] = static_cast<int32_t>(i / k);
  }
}

void gather(const Context& ctx, const GatherRows& a) {
  if (ctx.dry_run) return;
  check_ids(a.row_token, a.x.dim(0), "gather.row_token");
  with_types(a.x.dtype, [&]<class C, class S>() {
    for (int64_t r = 0; r < a.row_token.dim(0); ++r) {
      const C* x = row_of<C>(a.x, a.row_token.as<int32_t>()[r]);
      std::copy(x, x + a.x.dim(1), row_of<C>(a.rows, r));
    }
  });
}

void gather_backward(const Context& ctx, const GatherRowsBackward& a) {
  if (ctx.dry_run) return;
  check_ids(a.row_of, a.drows.dim(0), "gather.row_of");
  with_types(a.drows.dtype, [&]<class C, class S>() {
    for (int64_t t = 0; t < a.row_of.dim(0); ++t)
      for (int64_t h = 0; h < a.dx.dim(1); ++h) {
        double sum = 0;
        for (int64_t j = 0; j < a.row_of.dim(1); ++j)
          sum += load(row_of<C>(a.drows, row_of<int32_t>(a.row_of, t)[j])[h]);
        store(row_of<C>(a.dx, t)[h], sum);
      }
  });
}

void combine(const Context& ctx, const CombineRows& a) {
  if (ctx.dry_run) return;
  check_ids(a.row_of, a.rows.dim(0), "combine.row_of");
  with_types(a.rows.dtype, [&]<class C, class S>() {
    for (int64_t t = 0; t < a.row_of.dim(0); ++t)
      for (int64_t h = 0; h < a.y.dim(1); ++h) {
        double sum = is_given(a.residual) ? load(row_of<C>(a.residual, t)[h]) : 0.0;
        if (is_given(a.add)) sum += load(row_of<C>(a.add, t)[h]);
        for (int64_t j = 0; j < a.row_of.dim(1); ++j)
          sum += load(row_of<C>(a.rows, row_of<int32_t>(a.row_of, t)[j])[h]);
        store(row_of<C>(a.y, t)[h], sum);
      }
  });
}

void scatter(const Context& ctx, const ScatterSlots& a) {
  if (ctx.dry_run) return;
  check_ids(a.row_of, a.rows.dim(0), "slots.row_of");
  with_stat(a.slots.dtype, [&]<class S>() {
    for (int64_t i = 0; i < a.slots.elements(); ++i) a.rows.as<S>()[a.row_of.as<int32_t>()[i]] = a.slots.as<S>()[i];
  });
}

void gather_back(const Context& ctx, const GatherSlots& a) {
  if (ctx.dry_run) return;
  check_ids(a.row_of, a.rows.dim(0), "slots.row_of");
  with_stat(a.slots.dtype, [&]<class S>() {
    for (int64_t i = 0; i < a.slots.elements(); ++i) a.slots.as<S>()[i] = a.rows.as<S>()[a.row_of.as<int32_t>()[i]];
  });
}

}  // namespace

PermuteKernels permute() {
  return {.make_plan = make_plan,
          .gather = gather,
          .gather_backward = gather_backward,
          .combine = combine,
          .scatter_slots = scatter,
          .gather_slots = gather_back};
}

}  // namespace concerto::ref
