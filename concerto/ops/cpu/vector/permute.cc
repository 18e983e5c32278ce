#include <algorithm>
#include <cstring>
#include <utility>

#include "concerto/ops/cpu/vector/drivers.h"

namespace concerto::cpu {
namespace {

// Counting sort in blocks of tokens: counts of each block, then their places, then each block writes its own.
void make_plan(const Context& ctx, const MakeDispatchPlan& a) {
  const int64_t tokens = a.expert_ids.dim(0), top_k = a.expert_ids.dim(1), experts = a.offsets.dim(0) - 1;
  const int64_t block_tokens = std::max<int64_t>(1024, blocks_of(tokens, 64)), blocks = blocks_of(tokens, block_tokens);
  ArenaScope scope(*ctx.scratch);
  const View places = ctx.scratch->take({blocks, experts}, DType::kI32);
  if (ctx.dry_run) return;
  const int32_t* ids = a.expert_ids.as<int32_t>();
  int32_t *next = places.as<int32_t>(), *offsets = a.offsets.as<int32_t>(), *row_token = a.row_token.as<int32_t>(),
          *row_of = a.row_of.as<int32_t>();
  const auto slots_end = [&](int64_t b) { return std::min(tokens, (b + 1) * block_tokens) * top_k; };
  ctx.pool->parallel_for(blocks, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t b = begin; b < end; ++b) {
      int32_t* counts = next + b * experts;
      std::fill_n(counts, experts, 0);
      for (int64_t i = b * block_tokens * top_k; i < slots_end(b); ++i) ++counts[ids[i]];
    }
  });
  int32_t row = 0;
  for (int64_t e = 0; e < experts; ++e) {
    offsets[e] = row;
    for (int64_t b = 0; b < blocks; ++b) row += std::exchange(next[b * experts + e], row);
  }
  offsets[experts] = row;
  ctx.pool->parallel_for(blocks, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t b = begin; b < end; ++b)
      for (int64_t i = b * block_tokens * top_k; i < slots_end(b); ++i) {
        const int32_t r = next[b * experts + ids[i]]++;
        row_token[r] = static_cast<int32_t>(i / top_k);
        row_of[i] = r;
      }
  });
}

void gather(const Context& ctx, const GatherRows& a) {
  if (ctx.dry_run) return;
  const Rows x(a.x), rows(a.rows);
  const int32_t* token = a.row_token.as<int32_t>();
  const int64_t bytes = a.x.cols() * x.element;
  ctx.pool->parallel_for(a.row_token.dim(0), grain_rows(2 * bytes), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) std::memcpy(rows[r], x[token[r]], static_cast<size_t>(bytes));
  });
}

template <Isa isa>
struct Permute {
  static const RowTable& table(const View& x) { return kernel_table(isa).rows[type_index(x.dtype)]; }

  static void sum(const Context& ctx, const View& rows_view, const View& row_of, const float* weights,
                  const View& add_view, const View& y_view) {
    const RowTable& t = table(y_view);
    const Rows add(add_view), y(y_view);
    const int64_t n = y_view.cols(), top_k = row_of.dim(1);
    const int32_t* row = row_of.as<int32_t>();
    ctx.pool->parallel_for(
        row_of.dim(0), grain_rows((top_k + 2) * n * y.element), [&](int64_t begin, int64_t end, int) {
          for (int64_t i = begin; i < end; ++i)
            t.sum_rows(rows_view.data, rows_view.row_stride, row + i * top_k, weights ? weights + i * top_k : nullptr,
                       top_k, i + 1 < end ? top_k : 0, add.data ? add[i] : nullptr, y[i], n);
        });
  }

  static void gather_backward(const Context& ctx, const GatherRowsBackward& a) {
    if (ctx.dry_run) return;
    sum(ctx, a.drows, a.row_of, nullptr, View{}, a.dx);
  }
  static void combine(const Context& ctx, const CombineRows& a) {
    if (ctx.dry_run) return;
    sum(ctx, a.rows, a.row_of, a.weights.as<float>(), a.add, a.y);
  }

  static void combine_backward(const Context& ctx, const CombineRowsBackward& a) {
    if (ctx.dry_run) return;
    const RowTable& t = table(a.dy);
    const Rows dy(a.dy), rows(a.rows), drows(a.drows);
    const int64_t n = a.dy.cols(), top_k = a.row_of.dim(1);
    const int32_t* row = a.row_of.as<int32_t>();
    const float* weights = a.weights.as<float>();
    float* dweights = a.dweights.as<float>();
    ctx.pool->parallel_for(a.dy.rows(), grain_rows((2 * top_k + 1) * n * dy.element),
                           [&](int64_t begin, int64_t end, int) {
                             for (int64_t i = begin * top_k; i < end * top_k; ++i) {
                               if (i + top_k < end * top_k)  // the rows of the next token lie anywhere
                                 for (int64_t at = 0; at < n * dy.element; at += 64) {
                                   __builtin_prefetch(rows[row[i + top_k]] + at);
                                   __builtin_prefetch(drows[row[i + top_k]] + at, 1);
                                 }
                               dweights[i] = t.scale_dot(dy[i / top_k], rows[row[i]], weights[i], drows[row[i]], n);
                             }
                           });
  }

  static void fill(Backend& b) { b.permute = {make_plan, gather, gather_backward, combine, combine_backward}; }
};

}  // namespace

void fill_permute(Backend& backend, Isa isa) { fill_for<Permute>(backend, isa); }

}  // namespace concerto::cpu
