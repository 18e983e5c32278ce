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
  const int64_t tokens = args.row_of.dim(0), top_k = args.row_of.dim(1), hidden = args.rows.dim(1);
  check_view(args.weights, {tokens, top_k}, stat_dtype(type), "combine.weights");
  check_dense(args.weights, "combine.weights");
  check_view(args.y, {tokens, hidden}, type, "combine.y");
  check_memory(ctx, {args.rows, args.row_of, args.weights, args.y});
  if (is_given(args.add)) {
    check_view(args.add, {tokens, hidden}, type, "combine.add");
    check_memory(ctx, {args.add});
    check_apart(args.y, {args.add}, "combine.y");
  }
  check_apart(args.y, {args.rows, args.row_of, args.weights}, "combine.y");
  if (tokens == 0) return;
  run_kernel(ctx, OpFamily::kPermute, ctx.backend->permute.combine, args, "combine_rows");
}

void combine_rows_backward(const Context& ctx, const CombineRowsBackward& args) {
  check_compute(args.rows, "combine.rows");
  check_rank(args.rows, 2, "combine.rows");
  check_row_of(args.row_of, "combine.row_of");
  const DType type = args.rows.dtype;
  const int64_t tokens = args.row_of.dim(0), top_k = args.row_of.dim(1), hidden = args.rows.dim(1);
  check_view(args.dy, {tokens, hidden}, type, "combine.dy");
  check_view(args.weights, {tokens, top_k}, stat_dtype(type), "combine.weights");
  check_dense(args.weights, "combine.weights");
  check_view(args.drows, args.rows.shape, type, "combine.drows");
  check_view(args.dweights, {tokens, top_k}, stat_dtype(type), "combine.dweights");
  check_dense(args.dweights, "combine.dweights");
  check_memory(ctx, {args.dy, args.rows, args.row_of, args.weights, args.drows, args.dweights});
  if (!same_memory(args.rows, args.drows)) check_apart(args.drows, {args.rows}, "combine.drows");
  check_apart(args.drows, {args.dy, args.row_of, args.weights, args.dweights}, "combine.drows");
  check_apart(args.dweights, {args.dy, args.rows, args.row_of, args.weights}, "combine.dweights");
  if (tokens == 0) return;
  run_kernel(ctx, OpFamily::kPermute, ctx.backend->permute.combine_backward, args, "combine_rows_backward");
}

}  // namespace concerto
