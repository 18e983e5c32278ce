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
  if (is_given(args.weights)) {
    check_view(args.weights, {rows}, stat_dtype(args.act.dtype), "swiglu.weights");
    check_memory(ctx, {args.weights});
  }
  check_apart(args.act, {args.gate_up, args.weights}, "swiglu.act");
  if (rows == 0) return;
  run_kernel(ctx, OpFamily::kElementwise, ctx.backend->swiglu.forward, args, "swiglu_forward");
}

void swiglu_backward(const Context& ctx, const SwigluBackward& args) {
  check_compute(args.gate_up, "swiglu.gate_up");
  check_rank(args.dact, 2, "swiglu.dact");
  const DType type = args.gate_up.dtype;
  const int64_t rows = args.dact.dim(0), width = args.dact.dim(1);
  check_view(args.dact, {rows, width}, type, "swiglu.dact");
  check_view(args.gate_up, {rows, 2 * width}, type, "swiglu.gate_up");
  check_view(args.dgate_up, {rows, 2 * width}, type, "swiglu.dgate_up");
  check_memory(ctx, {args.gate_up, args.dact, args.dgate_up});
  check_apart(args.dgate_up, {args.dact, args.weights}, "swiglu.dgate_up");
  if (!same_memory(args.gate_up, args.dgate_up)) check_apart(args.dgate_up, {args.gate_up}, "swiglu.dgate_up");
  CHECK(is_given(args.weights) == is_given(args.dweights), "swiglu: weights and dweights come together");
  if (is_given(args.weights)) {
    check_view(args.weights, {rows}, stat_dtype(type), "swiglu.weights");
    check_view(args.dweights, {rows}, stat_dtype(type), "swiglu.dweights");
    check_memory(ctx, {args.weights, args.dweights});
    check_apart(args.dweights, {args.gate_up, args.weights, args.dact, args.dgate_up}, "swiglu.dweights");
  }
  if (is_given(args.act)) {
    check_view(args.act, {rows, width}, type, "swiglu.act");
    check_memory(ctx, {args.act});
    check_apart(args.act, {args.gate_up, args.weights, args.dgate_up, args.dweights}, "swiglu.act");
    if (!same_memory(args.act, args.dact)) check_apart(args.act, {args.dact}, "swiglu.act");
  }
  if (rows == 0) return;
  run_kernel(ctx, OpFamily::kElementwise, ctx.backend->swiglu.backward, args, "swiglu_backward");
}

}  // namespace concerto
