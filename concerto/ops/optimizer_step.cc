#include "concerto/ops/optimizer_step.h"

#include <cmath>

#include "concerto/ops/backend.h"
#include "concerto/ops/checks.h"

namespace concerto {
namespace {

void check_step(const Context& ctx, const AdamStep& args) {
  const DType stat = args.w.dtype;
  CHECK(stat == DType::kF32 || stat == DType::kF64, "step.w is {}", dtype_name(stat));
  check_dense(args.w, "step.w");
  const bool narrow = args.m.dtype == DType::kBF16 && stat == DType::kF32;
  const DType moments = narrow ? DType::kBF16 : stat;
  check_view(args.m, args.w.shape, moments, "step.m");
  check_view(args.v, args.w.shape, moments, "step.v");
  check_view(args.grad, args.w.shape, stat, "step.grad");
  for (const View& v : {args.m, args.v, args.grad}) check_dense(v, "step.m, v, grad");
  check_memory(ctx, {args.w, args.m, args.v, args.grad});
  if (is_given(args.copy)) {
    check_compute(args.copy, "step.copy");
    CHECK(stat_dtype(args.copy.dtype) == stat, "step.copy is {}", dtype_name(args.copy.dtype));
    check_view(args.copy, args.w.shape, args.copy.dtype, "step.copy");
    check_dense(args.copy, "step.copy");
    check_memory(ctx, {args.copy});
    check_apart(args.copy, {args.w, args.m, args.v, args.grad}, "step.copy");
  }
  CHECK(
      !args.packed || (!is_given(args.copy) && args.packed.groups * args.packed.n * args.packed.k == args.w.elements()),
      "step.packed is [{}, {}, {}]", args.packed.groups, args.packed.n, args.packed.k);
  CHECK(!args.packed || args.packed.packing == ctx.backend->linear.packing ||
            args.packed.packing == ctx.backend->grouped_linear.packing,
        "a weight packed for other products");
  check_apart(args.w, {args.m, args.v, args.grad}, "step.w");
  check_apart(args.m, {args.v, args.grad}, "step.m");
  check_apart(args.v, {args.grad}, "step.v");
  const MomentRounding& r = args.rounding;
  CHECK(!narrow || (r.keys && r.count > 0 && r.ends[r.count - 1] == args.w.elements()),
        "step.rounding ends at {} of {}", r.count > 0 ? r.ends[r.count - 1] : 0, args.w.elements());
  CHECK(args.c1 > 0 && args.c2 > 0, "bias corrections {} and {}", args.c1, args.c2);
}

}  // namespace

void adamw_step(const Context& ctx, const AdamStep& args) {
  check_step(ctx, args);
  if (args.w.elements() == 0) return;
  run_kernel(ctx, OpFamily::kOptimizer, ctx.backend->optimizer.adamw, args, "adamw_step");
}

double lamb_trust_ratio(double w_squares, double u_squares) {
  return w_squares > 0 && u_squares > 0 ? std::sqrt(w_squares) / std::sqrt(u_squares) : 1.0;
}

void lamb_norms(const Context& ctx, const LambNorms& args) {
  CHECK(!args.step.packed, "lamb_step writes no packed copy");
  check_step(ctx, args.step);
  check_view(args.norms, {2}, DType::kF64, "step.norms");
  if (args.step.w.elements() > 0)
    run_kernel(ctx, OpFamily::kOptimizer, ctx.backend->optimizer.lamb_norms, args, "lamb_norms");
  else if (!ctx.dry_run)
    args.norms.as<double>()[0] = args.norms.as<double>()[1] = 0;
}

void lamb_apply(const Context& ctx, const LambApply& args) {
  check_step(ctx, args.step);
  if (args.step.w.elements() > 0)
    run_kernel(ctx, OpFamily::kOptimizer, ctx.backend->optimizer.lamb_apply, args, "lamb_apply");
}

void lamb_step(const Context& ctx, const AdamStep& args) {
  OpScope scope(ctx, OpFamily::kOptimizer);
  ArenaScope arena(*ctx.scratch);
  const View norms = ctx.scratch->take({2}, DType::kF64);
  lamb_norms(ctx, {.step = args, .norms = norms});
  LambApply apply{.step = args, .trust_ratio = 1};
  if (!ctx.dry_run) apply.trust_ratio = lamb_trust_ratio(norms.as<double>()[0], norms.as<double>()[1]);
  lamb_apply(ctx, apply);
}

}  // namespace concerto
