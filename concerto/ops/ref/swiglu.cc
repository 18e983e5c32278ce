#include "concerto/ops/ref/kernels.h"

namespace concerto::ref {
namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

template <class S>
double weight_of(const View& weights, int64_t row) {
  return is_given(weights) ? load(weights.as<S>()[row]) : 1.0;
}

void forward(const Context& ctx, const SwigluForward& a) {
  if (ctx.dry_run) return;
  const int64_t width = a.act.dim(1);
  with_types(a.act.dtype, [&]<class C, class S>() {
    for (int64_t r = 0; r < a.act.dim(0); ++r) {
      const C* gate = row_of<C>(a.gate_up, r);
      const double weight = weight_of<S>(a.weights, r);
      for (int64_t f = 0; f < width; ++f)
        store(row_of<C>(a.act, r)[f], weight * load(gate[f]) * sigmoid(load(gate[f])) * load(gate[width + f]));
    }
  });
}

void backward(const Context& ctx, const SwigluBackward& a) {
  if (ctx.dry_run) return;
  const int64_t width = a.dact.dim(1);
  with_types(a.dact.dtype, [&]<class C, class S>() {
    for (int64_t r = 0; r < a.dact.dim(0); ++r) {
      const C* gate_up = row_of<C>(a.gate_up, r);
      C* dgate_up = row_of<C>(a.dgate_up, r);
      const double weight = weight_of<S>(a.weights, r);
      double dot = 0;
      for (int64_t f = 0; f < width; ++f) {
        const double dact = load(row_of<C>(a.dact, r)[f]), gate = load(gate_up[f]), up = load(gate_up[width + f]);
        const double s = sigmoid(gate);
        dot += dact * gate * s * up;
        store(dgate_up[f], weight * dact * up * s * (1 + gate * (1 - s)));
        store(dgate_up[width + f], weight * dact * gate * s);
        if (is_given(a.act))
          store(row_of<C>(a.act, r)[f], weight * gate * s * up);  // dact is read: same memory is fine
      }
      if (is_given(a.dweights)) store(a.dweights.as<S>()[r], dot);
    }
  });
}

}  // namespace

SwigluKernels swiglu() { return {.forward = forward, .backward = backward}; }

}  // namespace concerto::ref
