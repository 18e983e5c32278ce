#include "concerto/ops/grouped_linear.h"

#include "concerto/ops/backend.h"
#include "concerto/ops/checks.h"

namespace concerto {
namespace {

// Rows of the product: those of `x`, or of the list that says which rows of x they are.
int64_t grouped_rows(const Context& ctx, const View& x, const View& row_token) {
  if (!is_given(row_token)) return x.dim(0);
  check_rank(row_token, 1, "grouped_linear.row_token");
  check_view(row_token, {row_token.dim(0)}, DType::kI32, "grouped_linear.row_token");
  check_memory(ctx, {row_token});
  return row_token.dim(0);
}

}  // namespace

void grouped_linear_forward(const Context& ctx, const GroupedLinearForward& args) {
  check_compute(args.x, "grouped_linear.x");
  check_rank(args.x, 2, "grouped_linear.x");
  check_rank(args.w, 3, "grouped_linear.w");
  const int64_t rows = grouped_rows(ctx, args.x, args.row_token), in = args.x.dim(1), experts = args.w.dim(0),
                out = args.w.dim(1);
  check_view(args.w, {experts, out, in}, args.x.dtype, "grouped_linear.w");
  check_dense(args.w, "grouped_linear.w");
  check_view(args.offsets, {experts + 1}, DType::kI32, "grouped_linear.offsets");
  check_view(args.y, {rows, out}, args.x.dtype, "grouped_linear.y");
  check_memory(ctx, {args.x, args.offsets, args.y});
  check_weight_memory(ctx, args.w, args.packed, ctx.backend->grouped_linear.packing);
  check_apart(args.y, {args.x, args.w, args.row_token}, "grouped_linear.y");
  if (rows == 0) return;
  run_kernel(ctx, OpFamily::kExperts, ctx.backend->grouped_linear.forward, args, "grouped_linear_forward");
}

void grouped_linear_backward_input(const Context& ctx, const GroupedLinearBackwardInput& args) {
  check_compute(args.dy, "grouped_linear.dy");
  check_rank(args.dy, 2, "grouped_linear.dy");
  check_rank(args.w, 3, "grouped_linear.w");
  const int64_t rows = grouped_rows(ctx, args.dy, args.row_token), out = args.dy.dim(1), experts = args.w.dim(0),
                in = args.w.dim(2);
  check_view(args.w, {experts, out, in}, args.dy.dtype, "grouped_linear.w");
  check_dense(args.w, "grouped_linear.w");
  check_view(args.offsets, {experts + 1}, DType::kI32, "grouped_linear.offsets");
  check_view(args.dx, {rows, in}, args.dy.dtype, "grouped_linear.dx");
  check_memory(ctx, {args.dy, args.offsets, args.dx});
  check_weight_memory(ctx, args.w, args.packed, ctx.backend->grouped_linear.packing);
  check_apart(args.dx, {args.dy, args.w, args.row_token}, "grouped_linear.dx");
  if (rows == 0) return;
  run_kernel(ctx, OpFamily::kExperts, ctx.backend->grouped_linear.backward_input, args,
             "grouped_linear_backward_input");
}

void grouped_linear_backward_weight(const Context& ctx, const GroupedLinearBackwardWeight& args) {
  check_compute(args.x, "grouped_linear.x");
  check_rank(args.x, 2, "grouped_linear.x");
  check_rank(args.dw, 3, "grouped_linear.dw");
  check_rank(args.dy, 2, "grouped_linear.dy");
  CHECK(!is_given(args.x_row_token) || !is_given(args.dy_row_token), "grouped_linear: both operands by token");
  const int64_t rows = grouped_rows(ctx, args.x, args.x_row_token), in = args.x.dim(1), experts = args.dw.dim(0),
                out = args.dw.dim(1);
  CHECK(grouped_rows(ctx, args.dy, args.dy_row_token) == rows, "grouped_linear.dy has other rows than x: {}", rows);
  check_view(args.dy, {args.dy.dim(0), out}, args.x.dtype, "grouped_linear.dy");
  check_view(args.offsets, {experts + 1}, DType::kI32, "grouped_linear.offsets");
  check_view(args.dw, {experts, out, in}, stat_dtype(args.x.dtype), "grouped_linear.dw");
  check_dense(args.dw, "grouped_linear.dw");
  check_memory(ctx, {args.x, args.dy, args.offsets, args.dw});
  check_apart(args.dw, {args.x, args.dy}, "grouped_linear.dw");
  if (rows == 0 && args.accumulate) return;
  run_kernel(ctx, OpFamily::kExperts, ctx.backend->grouped_linear.backward_weight, args,
             "grouped_linear_backward_weight");
}

}  // namespace concerto
