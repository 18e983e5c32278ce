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
          .trust_ratio = f(trust_ratio),
          .key_first = 0,
          .key_second = 0,
          .element = 0};
}

// f(begin, end, scalars) on pieces of [begin, end): all of it, or with bf16 moments those that share a key.
template <class F>
void in_pieces(const AdamStep& a, const AdamScalars& s, int64_t begin, int64_t end, F&& f) {
  if (a.m.dtype != DType::kBF16) return f(begin, end, s);
  AdamScalars keyed = s;
  for_rounded_pieces(a.rounding, begin, end, [&](int64_t b, int64_t e, RoundingKey key, uint32_t element) {
    keyed.key_first = key.first;
    keyed.key_second = key.second;
    keyed.element = element;
    f(b, e, keyed);
  });
}

struct Pointers {
  float* w;
  const float* grad;
  char *m, *v, *copy;
  int64_t moment_element, copy_element;
  explicit Pointers(const AdamStep& s)
      : w(s.w.as<float>()),
        grad(s.grad.as<float>()),
        m(static_cast<char*>(s.m.data)),
        v(static_cast<char*>(s.v.data)),
        copy(static_cast<char*>(s.copy.data)),
        moment_element(dtype_bytes(s.m.dtype)),
        copy_element(dtype_bytes(s.copy.dtype)) {}
  void* m_at(int64_t i) const { return m + i * moment_element; }
  void* v_at(int64_t i) const { return v + i * moment_element; }
  void* copy_at(int64_t i) const { return copy ? copy + i * copy_element : nullptr; }
};

template <Isa isa>
struct Step {
  static const OptimizerTable& table(const AdamStep& s) {
    return kernel_table(isa).optimizer[(s.copy ? type_index(s.copy.dtype) : 0) + 2 * type_index(s.m.dtype)];
  }

  static void adamw(const Context& ctx, const AdamStep& a) {
    if (ctx.dry_run) return;
    const OptimizerTable& t = table(a);
    const Pointers p(a);
    const AdamScalars s = scalars(a, 1);
    if (a.packed) return adamw_packed(ctx, a, p, s);
    ctx.pool->parallel_for(a.w.elements(), kSumBlock, [&](int64_t begin, int64_t end, int) {
      in_pieces(a, s, begin, end, [&](int64_t b, int64_t e, const AdamScalars& scalars) {
        t.adamw(p.w + b, p.m_at(b), p.v_at(b), p.grad + b, p.copy_at(b), e - b, scalars);
      });
    });
  }

  // The copy of a piece stays in the first cache levels until it is packed.
  static void adamw_packed(const Context& ctx, const AdamStep& a, const Pointers& p, const AdamScalars& s) {
    const OptimizerTable& t = kernel_table(isa).optimizer[type_index(DType::kBF16) + 2 * type_index(a.m.dtype)];
    CHECK(a.packed.packing->rows <= WeightPacking::kMostRows, "pieces of {} rows", a.packed.packing->rows);
    for_pieces(*ctx.pool, a.packed, [&](int64_t offset, int64_t rows, int64_t columns, const auto& pack) {
      PackingPiece room;
      bf16* piece = room.data();
      for (int64_t r = 0, i = offset; r < rows; ++r, i += a.packed.k)
        in_pieces(a, s, i, i + columns, [&](int64_t b, int64_t e, const AdamScalars& scalars) {
          t.adamw(p.w + b, p.m_at(b), p.v_at(b), p.grad + b, piece + r * columns + (b - i), e - b, scalars);
        });
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
        const int64_t first = b * kSumBlock;
        sums[2 * b] = sums[2 * b + 1] = 0;
        in_pieces(a.step, s, first, std::min(first + kSumBlock, n), [&](int64_t i, int64_t e, const AdamScalars& k) {
          t.lamb_norms(p.w + i, p.m_at(i), p.v_at(i), p.grad + i, e - i, k, sums + 2 * b);
        });
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
      t.lamb_apply(p.w + begin, p.m_at(begin), p.v_at(begin), p.copy_at(begin), end - begin, s);
    });
  }

  static void fill(Backend& b) { b.optimizer = {adamw, lamb_norms, lamb_apply}; }
};

}  // namespace

void fill_optimizer(Backend& backend, Isa isa) { fill_for<Step>(backend, isa); }

}  // namespace concerto::cpu
