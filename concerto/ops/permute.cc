#include "concerto/ops/permute.h"

#include "concerto/ops/backend.h"
#include "concerto/ops/checks.h"

namespace concerto {
namespace {

void check_row_of(const View& row_of, const char* name) {
  check_rank(row_of, 2, name);
  CHECK(row_of.dtype == DType::kI32, "{} is {}", name, dtype_name(row_of.dtype));
  check_dense(row_of, name);
}

}  // namespace

// No early return: without tokens the offsets must still become zero.
void make_dispatch_plan(const Context& ctx, const MakeDispatchPlan& args) {
  check_row_of(args.expert_ids, "plan.expert_ids");
  check_rank(args.offsets, 1, "plan.offsets");
  const int64_t tokens = args.expert_ids.dim(0), top_k = args.expert_ids.dim(1);
  CHECK(tokens * top_k <= INT32_MAX, "{} x {} rows", tokens, top_k);
  CHECK(args.offsets.dim(0) >= 2, "plan.offsets has {} entries", args.offsets.dim(0));
  check_view(args.offsets, {args.offsets.dim(0)}, DType::kI32, "plan.offsets");
  check_view(args.row_token, {tokens * top_k}, DType::kI32, "plan.row_token");
  check_view(args.row_of, {tokens, top_k}, DType::kI32, "plan.row_of");
  check_dense(args.row_of, "plan.row_of");
  check_memory(ctx, {args.expert_ids, args.offsets, args.row_token, args.row_of});
  check_apart(args.row_of, {args.expert_ids, args.row_token, args.offsets}, "plan.row_of");
  check_apart(args.row_token, {args.expert_ids, args.offsets}, "plan.row_token");
  run_kernel(ctx, OpFamily::kPermute, ctx.backend->permute.make_plan, args, "make_dispatch_plan");
}

void gather_rows(const Context& ctx, const GatherRows& args) {
  check_compute(args.x, "gather.x");
  check_rank(args.x, 2, "gather.x");
  check_rank(args.row_token, 1, "gather.row_token");
  const int64_t rows = args.row_token.dim(0);
  check_view(args.row_token, {rows}, DType::kI32, "gather.row_token");
  check_view(args.rows, {rows, args.x.dim(1)}, args.x.dtype, "gather.rows");
  check_memory(ctx, {args.x, args.row_token, args.rows});
  check_apart(args.rows, {args.x, args.row_token}, "gather.rows");
  if (rows == 0) return;
  run_kernel(ctx, OpFamily::kPermute, ctx.backend->permute.gather, args, "gather_rows");
}

void gather_rows_backward(const Context& ctx, const GatherRowsBackward& args) {
  check_compute(args.drows, "gather.drows");
  check_rank(args.drows, 2, "gather.drows");
  check_row_of(args.row_of, "gather.row_of");
  const int64_t tokens = args.row_of.dim(0);
  check_view(args.dx, {tokens, args.drows.dim(1)}, args.drows.dtype, "gather.dx");
  check_memory(ctx, {args.drows, args.row_of, args.dx});
  check_apart(args.dx, {args.drows, args.row_of}, "gather.dx");
  if (tokens == 0) return;
  run_kernel(ctx, OpFamily::kPermute, ctx.backend->permute.gather_backward, args, "gather_rows_backward");
}

void combine_rows(const Context& ctx, const CombineRows& args) {
  check_compute(args.rows, "combine.rows");
  check_rank(args.rows, 2, "combine.rows");
  check_row_of(args.row_of, "combine.row_of");
  const DType type = args.rows.dtype;
  const int64_t tokens = args.row_of.dim(0), hidden = args.rows.dim(1);
  check_view(args.y, {tokens, hidden}, type, "combine.y");
  check_memory(ctx, {args.rows, args.row_of, args.y});
  for (const View& v : {args.add, args.residual}) {
    if (!is_given(v)) continue;
    check_view(v, {tokens, hidden}, type, "combine.add");
    check_memory(ctx, {v});
  }
  check_apart(args.y, {args.rows, args.row_of, args.add, args.residual}, "combine.y");
  if (tokens == 0) return;
  run_kernel(ctx, OpFamily::kPermute, ctx.backend->permute.combine, args, "combine_rows");
}

namespace {

void check_slots(const Context& ctx, const View& slots, const View& row_of, const View& rows) {
  check_row_of(row_of, "slots.row_of");
  CHECK(slots.dtype == DType::kF32 || slots.dtype == DType::kF64, "slots are {}", dtype_name(slots.dtype));
  check_view(slots, row_of.shape, slots.dtype, "slots");
  check_dense(slots, "slots");
  check_rank(rows, 1, "slots.rows");
  check_view(rows, rows.shape, slots.dtype, "slots.rows");
  check_memory(ctx, {slots, row_of, rows});
}

}  // namespace

void scatter_slots(const Context& ctx, const ScatterSlots& args) {
  check_slots(ctx, args.slots, args.row_of, args.rows);
  check_apart(args.rows, {args.slots, args.row_of}, "slots.rows");
  if (args.row_of.dim(0) == 0) return;
  run_kernel(ctx, OpFamily::kPermute, ctx.backend->permute.scatter_slots, args, "scatter_slots");
}

void gather_slots(const Context& ctx, const GatherSlots& args) {
  check_slots(ctx, args.slots, args.row_of, args.rows);
  check_apart(args.slots, {args.rows, args.row_of}, "slots");
  if (args.row_of.dim(0) == 0) return;
  run_kernel(ctx, OpFamily::kPermute, ctx.backend->permute.gather_slots, args, "gather_slots");
}

}  // namespace concerto
