#include "concerto/ops/cpu/vector/drivers.h"

namespace concerto::cpu {
namespace {

template <Isa isa>
struct Turn {
  static void apply(const Context& ctx, const Rope& a) {
    if (ctx.dry_run) return;
    const RowTable& t = kernel_table(isa).rows[type_index(a.x.dtype)];
    const int64_t dim = a.cos_sin.dim(1), heads = a.x.cols() / dim;
    const Rows x(a.x);
    const int32_t* positions = a.positions.as<int32_t>();
    const float* table = a.cos_sin.as<float>();
    ctx.pool->parallel_for(a.x.rows(), grain_rows(a.x.cols() * x.element), [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; ++r) t.rope(x[r], table + positions[r] * dim, heads, dim, a.inverse);
    });
  }

  static void fill(Backend& b) { b.rope = {apply}; }
};

}  // namespace

void fill_rope(Backend& backend, Isa isa) { fill_for<Turn>(backend, isa); }

}  // namespace concerto::cpu
