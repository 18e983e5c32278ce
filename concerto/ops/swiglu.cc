#include "concerto/ops/swiglu.h"

#include "concerto/ops/backend.h"
#include "concerto/ops/checks.h"

namespace concerto {

void swiglu_forward(const Context& ctx, const SwigluForward& args) {
  check_compute(args.gate_up, "swiglu.gate_up");
  check_rank(args.act, 2, "swiglu.act");
  const int64_t rows = args.act.dim(0), width = args.act.dim(1);
  check_view(args.act, {rows, width}, args.gate_up.dtype, "swiglu.act");
  check_view(args.gate_up, {rows, 2 * width}, args.gate_up.dtype, "swiglu.gate_up");
  check_memory(ctx, {args.gate_up, args.act});
  check_apart(args.act, {args.gate_up}, "swiglu.act");
  if (rows == 0) return;
  run_kernel(ctx, OpFamily::kElementwise, ctx.backend->swiglu.forward, args, "swiglu_forward");
}

void swiglu_backward(const Context& ctx, const SwigluBackward& args) {
  check_compute(args.gate_up, "swiglu.gate_up");
  check_rank(args.dact, 2, "swiglu.dact");
  const int64_t rows = args.dact.dim(0), width = args.dact.dim(1);
  check_view(args.dact, {rows, width}, args.gate_up.dtype, "swiglu.dact");
  check_view(args.gate_up, {rows, 2 * width}, args.gate_up.dtype, "swiglu.gate_up");
  check_view(args.dgate_up, {rows, 2 * width}, args.gate_up.dtype, "swiglu.dgate_up");
  check_memory(ctx, {args.gate_up, args.dact, args.dgate_up});
  check_apart(args.dgate_up, {args.dact}, "swiglu.dgate_up");
  if (!same_memory(args.gate_up, args.dgate_up)) check_apart(args.dgate_up, {args.gate_up}, "swiglu.dgate_up");
  if (rows == 0) return;
  run_kernel(ctx, OpFamily::kElementwise, ctx.backend->swiglu.backward, args, "swiglu_backward");
}

}  // namespace concerto
