#include "concerto/ops/ref/kernels.h"

namespace concerto::ref {
namespace {

void apply(const Context& ctx, const Rope& a) {
  if (ctx.dry_run) return;
  check_ids(a.positions, a.cos_sin.dim(0), "rope.positions");
  const int64_t head_dim = a.cos_sin.dim(1), heads = a.x.dim(1) / head_dim;
  with_types(a.x.dtype, [&]<class C, class S>() {
    for (int64_t t = 0; t < a.x.dim(0); ++t) {
      const S* table = row_of<S>(a.cos_sin, a.positions.as<int32_t>()[t]);
      for (int64_t n = 0; n < heads; ++n) {
        C* x = row_of<C>(a.x, t) + n * head_dim;
        for (int64_t j = 0; j < head_dim; j += 2) {
          const double c = load(table[j]), s = a.inverse ? -load(table[j + 1]) : load(table[j + 1]);
          const double even = load(x[j]), odd = load(x[j + 1]);
          store(x[j], even * c - odd * s);
          store(x[j + 1], odd * c + even * s);
        }
      }
    }
  });
}

}  // namespace

RopeKernels rope() { return {.apply = apply}; }

}  // namespace concerto::ref
