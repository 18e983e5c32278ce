#include "concerto/ops/rms_norm.h"

#include "concerto/ops/backend.h"
#include "concerto/ops/checks.h"

namespace concerto {

void rms_norm_forward(const Context& ctx, const RmsNormForward& args) {
  check_compute(args.x, "rms_norm.x");
  check_rank(args.x, 2, "rms_norm.x");
  const DType type = args.x.dtype, stat = stat_dtype(type);
  const int64_t rows = args.x.dim(0), hidden = args.x.dim(1);
  check_view(args.w, {hidden}, stat, "rms_norm.w");
  check_view(args.y, {rows, hidden}, type, "rms_norm.y");
  check_view(args.rstd, {rows}, stat, "rms_norm.rstd");
  check_memory(ctx, {args.x, args.w, args.y, args.rstd});
  check_apart(args.y, {args.x, args.w, args.rstd}, "rms_norm.y");
  if (rows == 0) return;
  run_kernel(ctx, OpFamily::kNorm, ctx.backend->rms_norm.forward, args, "rms_norm_forward");
}

void rms_norm_backward_input(const Context& ctx, const RmsNormBackwardInput& args) {
  check_compute(args.x, "rms_norm.x");
  check_rank(args.x, 2, "rms_norm.x");
  const DType type = args.x.dtype, stat = stat_dtype(type);
  const int64_t rows = args.x.dim(0), hidden = args.x.dim(1);
  check_view(args.dy, {rows, hidden}, type, "rms_norm.dy");
  check_view(args.w, {hidden}, stat, "rms_norm.w");
  check_view(args.rstd, {rows}, stat, "rms_norm.rstd");
  check_view(args.dx, {rows, hidden}, type, "rms_norm.dx");
  check_memory(ctx, {args.dy, args.x, args.w, args.rstd, args.dx});
  if (is_given(args.residual)) {
    check_view(args.residual, {rows, hidden}, type, "rms_norm.residual");
    check_memory(ctx, {args.residual});
    if (!same_memory(args.residual, args.dx)) check_apart(args.dx, {args.residual}, "rms_norm.dx");
  }
  check_apart(args.dx, {args.dy, args.x, args.w, args.rstd}, "rms_norm.dx");
  if (is_given(args.y)) {
    check_view(args.y, {rows, hidden}, type, "rms_norm.y");
    check_memory(ctx, {args.y});
    check_apart(args.y, {args.dy, args.x, args.w, args.rstd, args.residual, args.dx}, "rms_norm.y");
  }
  if (rows == 0) return;
  run_kernel(ctx, OpFamily::kNorm, ctx.backend->rms_norm.backward_input, args, "rms_norm_backward_input");
}

void rms_norm_backward_weight(const Context& ctx, const RmsNormBackwardWeight& args) {
  check_compute(args.x, "rms_norm.x");
  check_rank(args.x, 2, "rms_norm.x");
  const DType type = args.x.dtype, stat = stat_dtype(type);
  const int64_t rows = args.x.dim(0), hidden = args.x.dim(1);
  check_view(args.dy, {rows, hidden}, type, "rms_norm.dy");
  check_view(args.rstd, {rows}, stat, "rms_norm.rstd");
  check_view(args.dw, {hidden}, stat, "rms_norm.dw");
  check_memory(ctx, {args.dy, args.x, args.rstd, args.dw});
  check_apart(args.dw, {args.dy, args.x, args.rstd}, "rms_norm.dw");
  if (rows == 0) return;
  run_kernel(ctx, OpFamily::kNorm, ctx.backend->rms_norm.backward_weight, args, "rms_norm_backward_weight");
}

}  // namespace concerto
