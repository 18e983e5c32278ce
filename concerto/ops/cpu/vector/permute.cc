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

void scatter_slots(const Context& ctx, const ScatterSlots& a) {
  if (ctx.dry_run) return;
  const int32_t* row = a.row_of.as<int32_t>();
  const float* slots = a.slots.as<float>();
  float* rows = a.rows.as<float>();
  ctx.pool->parallel_for(a.slots.elements(), 8192, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) rows[row[i]] = slots[i];
  });
}

void gather_slots(const Context& ctx, const GatherSlots& a) {
  if (ctx.dry_run) return;
  const int32_t* row = a.row_of.as<int32_t>();
  const float* rows = a.rows.as<float>();
  float* slots = a.slots.as<float>();
  ctx.pool->parallel_for(a.slots.elements(), 8192, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) slots[i] = rows[row[i]];
  });
}

template <Isa isa>
struct Permute {
  // y = first + second + the sum of a token's rows.
  static void sum(const Context& ctx, const View& rows, const View& row_of, const View& first_view,
                  const View& second_view, const View& y_view) {
    const RowTable& t = kernel_table(isa).rows[type_index(y_view.dtype)];
    const Rows first(first_view), second(second_view), y(y_view);
    const int64_t n = y_view.cols(), top_k = row_of.dim(1);
    const int32_t* row = row_of.as<int32_t>();
    ctx.pool->parallel_for(row_of.dim(0), grain_rows((top_k + 2) * n * y.element),
                           [&](int64_t begin, int64_t end, int) {
                             for (int64_t i = begin; i < end; ++i)
                               t.sum_rows(rows.data, rows.row_stride, row + i * top_k, top_k, i + 1 < end ? top_k : 0,
                                          first.data ? first[i] : nullptr, second.data ? second[i] : nullptr, y[i], n);
                           });
  }

  static void gather_backward(const Context& ctx, const GatherRowsBackward& a) {
    if (ctx.dry_run) return;
    sum(ctx, a.drows, a.row_of, View{}, View{}, a.dx);
  }
  static void combine(const Context& ctx, const CombineRows& a) {
    if (ctx.dry_run) return;
    sum(ctx, a.rows, a.row_of, a.residual, a.add, a.y);
  }

  static void fill(Backend& b) {
    b.permute = {make_plan, gather, gather_backward, combine, scatter_slots, gather_slots};
  }
};

}  // namespace

void fill_permute(Backend& backend, Isa isa) { fill_for<Permute>(backend, isa); }

}  // namespace concerto::cpu
