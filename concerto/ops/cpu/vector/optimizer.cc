#include <algorithm>
#include <cmath>

#include "concerto/ops/cpu/vector/drivers.h"

namespace concerto::cpu {
namespace {

AdamScalars scalars(const AdamStep& s, double trust_ratio) {
  const auto f = [](double x) { return static_cast<float>(x); };
  return {.lr = f(s.lr),
          .beta1 = f(s.beta1),
          .beta2 = f(s.beta2),
          .rest1 = f(1 - s.beta1),
          .rest2 = f(1 - s.beta2),
          .eps = f(s.eps),
          .weight_decay = f(s.weight_decay),
          .inverse_c1 = f(1 / s.c1),
          .inverse_sqrt_c2 = f(1 / std::sqrt(s.c2)),
          .grad_scale = f(s.grad_scale),
          .trust_ratio = f(trust_ratio)};
}

struct Pointers {
  float *w, *m, *v;
  const float* grad;
  char* copy;
  int64_t copy_element;
  explicit Pointers(const AdamStep& s)
      : w(s.w.as<float>()),
        m(s.m.as<float>()),
        v(s.v.as<float>()),
        grad(s.grad.as<float>()),
        copy(static_cast<char*>(s.copy.data)),
        copy_element(dtype_bytes(s.copy.dtype)) {}
  void* copy_at(int64_t i) const { return copy ? copy + i * copy_element : nullptr; }
};

constexpr int64_t kMostRows = 64;  // of a piece of a packed weight

template <Isa isa>
struct Step {
  static const OptimizerTable& table(const AdamStep& s) {
    return kernel_table(isa).optimizer[s.copy ? type_index(s.copy.dtype) : 0];
  }

  static void adamw(const Context& ctx, const AdamStep& a) {
    if (ctx.dry_run) return;
    const OptimizerTable& t = table(a);
    const Pointers p(a);
    const AdamScalars s = scalars(a, 1);
    if (a.packed) return adamw_packed(ctx, a, p, s);
    ctx.pool->parallel_for(a.w.elements(), kSumBlock, [&](int64_t begin, int64_t end, int) {
      t.adamw(p.w + begin, p.m + begin, p.v + begin, p.grad + begin, p.copy_at(begin), end - begin, s);
    });
  }

  // The copy of a piece stays in the first cache levels until it is packed.
  static void adamw_packed(const Context& ctx, const AdamStep& a, const Pointers& p, const AdamScalars& s) {
    const OptimizerTable& t = kernel_table(isa).optimizer[type_index(DType::kBF16)];
    CHECK(a.packed.packing->rows <= kMostRows, "pieces of {} rows", a.packed.packing->rows);
    for_pieces(*ctx.pool, a.packed, [&](int64_t offset, int64_t rows, int64_t columns, const auto& pack) {
      bf16 piece[kMostRows * WeightPacking::kColumns];
      for (int64_t r = 0, i = offset; r < rows; ++r, i += a.packed.k)
        t.adamw(p.w + i, p.m + i, p.v + i, p.grad + i, piece + r * columns, columns, s);
      pack(piece);
    });
  }

  static void lamb_norms(const Context& ctx, const LambNorms& a) {
    const int64_t n = a.step.w.elements(), blocks = blocks_of(n, kSumBlock);
    ArenaScope scope(*ctx.scratch);
    const View partial = ctx.scratch->take({blocks, 2}, DType::kF64);
    if (ctx.dry_run) return;
    const OptimizerTable& t = table(a.step);
    const Pointers p(a.step);
    const AdamScalars s = scalars(a.step, 1);
    double *sums = partial.as<double>(), *norms = a.norms.as<double>();
    ctx.pool->parallel_for(blocks, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t b = begin; b < end; ++b) {
        const int64_t i = b * kSumBlock;
        sums[2 * b] = sums[2 * b + 1] = 0;
        t.lamb_norms(p.w + i, p.m + i, p.v + i, p.grad + i, std::min(kSumBlock, n - i), s, sums + 2 * b);
      }
    });
    norms[0] = norms[1] = 0;
    for (int64_t b = 0; b < blocks; ++b) {
      norms[0] += sums[2 * b];
      norms[1] += sums[2 * b + 1];
    }
  }

  static void lamb_apply(const Context& ctx, const LambApply& a) {
    if (ctx.dry_run) return;
    const OptimizerTable& t = table(a.step);
    const Pointers p(a.step);
    const AdamScalars s = scalars(a.step, a.trust_ratio);
    ctx.pool->parallel_for(a.step.w.elements(), kSumBlock, [&](int64_t begin, int64_t end, int) {
      t.lamb_apply(p.w + begin, p.m + begin, p.v + begin, p.copy_at(begin), end - begin, s);
    });
  }

  static void fill(Backend& b) { b.optimizer = {adamw, lamb_norms, lamb_apply}; }
};

}  // namespace

void fill_optimizer(Backend& backend, Isa isa) { fill_for<Step>(backend, isa); }

}  // namespace concerto::cpu
