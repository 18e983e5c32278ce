#include "concerto/ops/cpu/vector/drivers.h"

namespace concerto::cpu {
namespace {

const float* floats_of(const View& v) { return v ? v.as<float>() : nullptr; }

template <Isa isa>
struct Swiglu {
  static void forward(const Context& ctx, const SwigluForward& a) {
    if (ctx.dry_run) return;
    const RowTable& t = kernel_table(isa).rows[type_index(a.act.dtype)];
    const int64_t n = a.act.cols();
    const Rows gate_up(a.gate_up), act(a.act);
    const float* weights = floats_of(a.weights);
    ctx.pool->parallel_for(a.act.rows(), grain_rows(3 * n * act.element), [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; ++r)
        t.swiglu(gate_up[r], gate_up.at(r, n), weights ? weights[r] : 1.0f, act[r], n);
    });
  }

  static void backward(const Context& ctx, const SwigluBackward& a) {
    if (ctx.dry_run) return;
    const RowTable& t = kernel_table(isa).rows[type_index(a.dact.dtype)];
    const int64_t n = a.dact.cols();
    const Rows gate_up(a.gate_up), dact(a.dact), dgate_up(a.dgate_up), act(a.act);
    const float* weights = floats_of(a.weights);
    float* dweights = a.dweights ? a.dweights.as<float>() : nullptr;
    ctx.pool->parallel_for(a.dact.rows(), grain_rows(6 * n * dact.element), [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; ++r) {
        const float dot = t.swiglu_backward(gate_up[r], gate_up.at(r, n), dact[r], weights ? weights[r] : 1.0f,
                                            dgate_up[r], dgate_up.at(r, n), act.data ? act[r] : nullptr, n);
        if (dweights) dweights[r] = dot;
      }
    });
  }

  static void fill(Backend& b) { b.swiglu = {forward, backward}; }
};

}  // namespace

void fill_swiglu(Backend& backend, Isa isa) { fill_for<Swiglu>(backend, isa); }

}  // namespace concerto::cpu
