#include "concerto/ops/linear.h"

#include "concerto/ops/backend.h"
#include "concerto/ops/checks.h"

namespace concerto {

void linear_forward(const Context& ctx, const LinearForward& args) {
  check_compute(args.x, "linear.x");
  check_rank(args.x, 2, "linear.x");
  check_rank(args.w, 2, "linear.w");
  const DType type = args.x.dtype;
  const int64_t rows = args.x.dim(0), in = args.x.dim(1), out = args.w.dim(0);
  check_view(args.w, {out, in}, type, "linear.w");
  check_dense(args.w, "linear.w");
  if (is_given(args.bias)) check_view(args.bias, {out}, stat_dtype(type), "linear.bias");
  check_compute_or_stat(args.y, {rows, out}, type, "linear.y");
  check_memory(ctx, {args.x, args.y});
  check_weight_memory(ctx, args.w, args.packed, ctx.backend->linear.packing);
  if (is_given(args.bias)) check_memory(ctx, {args.bias});
  check_apart(args.y, {args.x, args.w, args.bias}, "linear.y");
  if (rows == 0) return;
  run_kernel(ctx, OpFamily::kDense, ctx.backend->linear.forward, args, "linear_forward");
}

void linear_backward_input(const Context& ctx, const LinearBackwardInput& args) {
  check_compute(args.dy, "linear.dy");
  check_rank(args.dy, 2, "linear.dy");
  check_rank(args.w, 2, "linear.w");
  const DType type = args.dy.dtype;
  const int64_t rows = args.dy.dim(0), out = args.dy.dim(1), in = args.w.dim(1);
  check_view(args.w, {out, in}, type, "linear.w");
  check_dense(args.w, "linear.w");
  check_compute_or_stat(args.dx, {rows, in}, type, "linear.dx");
  check_memory(ctx, {args.dy, args.dx});
  check_weight_memory(ctx, args.w, args.packed, ctx.backend->linear.packing);
  check_apart(args.dx, {args.dy, args.w}, "linear.dx");
  if (rows == 0) return;
  run_kernel(ctx, OpFamily::kDense, ctx.backend->linear.backward_input, args, "linear_backward_input");
}

void linear_backward_weight(const Context& ctx, const LinearBackwardWeight& args) {
  check_compute(args.x, "linear.x");
  check_rank(args.x, 2, "linear.x");
  check_rank(args.dy, 2, "linear.dy");
  const DType type = args.x.dtype;
  const int64_t rows = args.x.dim(0), in = args.x.dim(1), out = args.dy.dim(1);
  check_view(args.dy, {rows, out}, type, "linear.dy");
  check_view(args.dw, {out, in}, stat_dtype(type), "linear.dw");
  check_dense(args.dw, "linear.dw");
  if (is_given(args.db)) check_view(args.db, {out}, stat_dtype(type), "linear.db");
  check_memory(ctx, {args.x, args.dy, args.dw});
  if (is_given(args.db)) check_memory(ctx, {args.db});
  if (is_given(args.bias_dy)) {
    check_rank(args.bias_dy, 2, "linear.bias_dy");
    check_view(args.bias_dy, {args.bias_dy.dim(0), out}, type, "linear.bias_dy");
    CHECK(args.bias_dy.dim(0) <= rows, "linear.bias_dy has {} rows of {}", args.bias_dy.dim(0), rows);
    check_memory(ctx, {args.bias_dy});
  }
  check_apart(args.dw, {args.x, args.dy, args.db}, "linear.dw");
  check_apart(args.db, {args.x, args.dy, args.bias_dy}, "linear.db");
  if (rows == 0 && args.accumulate) return;
  run_kernel(ctx, OpFamily::kDense, ctx.backend->linear.backward_weight, args, "linear_backward_weight");
}

}  // namespace concerto
