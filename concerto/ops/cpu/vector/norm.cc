#include <algorithm>

#include "concerto/ops/cpu/vector/drivers.h"

namespace concerto::cpu {
namespace {

// Rows of one partial sum of the weight gradient: fixed by the shape, and few enough that adding them up costs little.
int64_t weight_block_rows(int64_t rows) { return std::max<int64_t>(64, blocks_of(rows, 64)); }

template <Isa isa>
struct Norm {
  static const RowTable& table(const View& x) { return kernel_table(isa).rows[type_index(x.dtype)]; }

  static void forward(const Context& ctx, const RmsNormForward& a) {
    if (ctx.dry_run) return;
    const RowTable& t = table(a.x);
    const int64_t n = a.x.cols();
    const Rows x(a.x), y(a.y);
    const float *w = a.w.as<float>(), eps = static_cast<float>(a.eps);
    float* rstd = a.rstd.as<float>();
    ctx.pool->parallel_for(a.x.rows(), grain_rows(n * x.element), [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; ++r) rstd[r] = t.rms_norm(x[r], w, eps, y[r], n);
    });
  }

  static void backward_input(const Context& ctx, const RmsNormBackwardInput& a) {
    if (ctx.dry_run) return;
    const RowTable& t = table(a.x);
    const int64_t n = a.x.cols();
    const Rows dy(a.dy), x(a.x), residual(a.residual), dx(a.dx), y(a.y);
    const float *w = a.w.as<float>(), *rstd = a.rstd.as<float>();
    ctx.pool->parallel_for(a.x.rows(), grain_rows(n * x.element), [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; ++r)
        t.rms_norm_backward(dy[r], x[r], w, rstd[r], residual.data ? residual[r] : nullptr, dx[r],
                            y.data ? y[r] : nullptr, n);
    });
  }

  static void backward_weight(const Context& ctx, const RmsNormBackwardWeight& a) {
    const int64_t rows = a.x.rows(), n = a.x.cols(), block_rows = weight_block_rows(rows);
    const int64_t blocks = blocks_of(rows, block_rows);
    ArenaScope scope(*ctx.scratch);
    const View partial = ctx.scratch->take({blocks, n}, DType::kF32);
    if (ctx.dry_run) return;
    const RowTable& t = table(a.x);
    const Rows dy(a.dy), x(a.x);
    const float* rstd = a.rstd.as<float>();
    float *sums = partial.as<float>(), *dw = a.dw.as<float>();
    ctx.pool->parallel_for(blocks, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t b = begin; b < end; ++b) {
        std::fill_n(sums + b * n, n, 0.0f);
        for (int64_t r = b * block_rows; r < std::min(rows, (b + 1) * block_rows); ++r)
          t.rms_norm_weight(dy[r], x[r], rstd[r], sums + b * n, n);
      }
    });
    for (int64_t b = 0; b < blocks; ++b) kernel_table(isa).rows[0].accumulate(sums + b * n, dw, n);
  }

  static void fill(Backend& b) { b.rms_norm = {forward, backward_input, backward_weight}; }
};

}  // namespace

void fill_norm(Backend& backend, Isa isa) { fill_for<Norm>(backend, isa); }

}  // namespace concerto::cpu
