#include <algorithm>
#include <cstring>

#include "concerto/ops/cpu/vector/drivers.h"

namespace concerto::cpu {
namespace {

// fn(row, column, count) over all elements: pieces of rows, or of the whole when everything is dense.
template <class F>
void for_pieces(const Context& ctx, const View& shape, bool dense, F fn) {
  const int64_t columns = dense ? shape.elements() : shape.cols(), rows = dense ? 1 : shape.rows();
  if (columns == 0) return;
  const int64_t piece = std::min<int64_t>(columns, 8192), per_row = blocks_of(columns, piece);
  const int64_t grain = std::max<int64_t>(1, 8192 / piece);
  ctx.pool->parallel_for(rows * per_row, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / per_row, column = i % per_row * piece;
      fn(row, column, std::min(piece, columns - column));
    }
  });
}

double wide_element(const char* p, DType type) {
  if (type == DType::kF64) return *reinterpret_cast<const double*>(p);
  if (type == DType::kF32) return *reinterpret_cast<const float*>(p);
  return static_cast<double>(static_cast<float>(*reinterpret_cast<const bf16*>(p)));
}

// To or from f64, which only tests and conversions of models use.
void cast_wide(const char* in, DType from, char* out, DType to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const double x = wide_element(in + i * dtype_bytes(from), from);
    char* p = out + i * dtype_bytes(to);
    if (to == DType::kF64)
      *reinterpret_cast<double*>(p) = x;
    else if (to == DType::kF32)
      *reinterpret_cast<float*>(p) = static_cast<float>(x);
    else
      *reinterpret_cast<bf16*>(p) = bf16(static_cast<float>(x));
  }
}

template <Isa isa>
struct Elements {
  static void add(const Context& ctx, const Add& a) {
    if (ctx.dry_run) return;
    const RowTable& t = kernel_table(isa).rows[type_index(a.a.dtype)];
    const Rows in_a(a.a), in_b(a.b), out(a.out);
    for_pieces(ctx, a.a, a.a.dense() && a.b.dense() && a.out.dense(),
               [&](int64_t r, int64_t c, int64_t n) { t.add(in_a.at(r, c), in_b.at(r, c), out.at(r, c), n); });
  }

  static void cast(const Context& ctx, const Cast& a) {
    if (ctx.dry_run) return;
    const Rows in(a.in), out(a.out);
    const DType from = a.in.dtype, to = a.out.dtype;
    const RowTable& narrow = kernel_table(isa).rows[1];
    for_pieces(ctx, a.in, a.in.dense() && a.out.dense(), [&](int64_t r, int64_t c, int64_t n) {
      const char* x = in.at(r, c);
      char* y = out.at(r, c);
      if (from == to)
        std::memcpy(y, x, static_cast<size_t>(n * in.element));
      else if (from == DType::kF32 && to == DType::kBF16)
        narrow.from_f32(reinterpret_cast<const float*>(x), y, n);
      else if (from == DType::kBF16 && to == DType::kF32)
        narrow.to_f32(x, reinterpret_cast<float*>(y), n);
      else
        cast_wide(x, from, y, to, n);
    });
  }

  static void sum_squares(const Context& ctx, const SumSquares& a) {
    const int64_t n = a.x.elements(), blocks = blocks_of(n, kSumBlock);
    ArenaScope scope(*ctx.scratch);
    const View partial = ctx.scratch->take({blocks}, DType::kF64);
    if (ctx.dry_run) return;
    const float* x = a.x.as<float>();
    double* sums = partial.as<double>();
    ctx.pool->parallel_for(blocks, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t b = begin; b < end; ++b)
        sums[b] = kernel_table(isa).optimizer[0].sum_squares(x + b * kSumBlock, std::min(kSumBlock, n - b * kSumBlock));
    });
    double total = 0;
    for (int64_t b = 0; b < blocks; ++b) total += sums[b];
    *a.out.as<double>() += total;
  }

  static void fill(Backend& b) { b.elementwise = {add, cast, sum_squares}; }
};

}  // namespace

void fill_elementwise(Backend& backend, Isa isa) { fill_for<Elements>(backend, isa); }

}  // namespace concerto::cpu
