#include <cstring>

#include "concerto/ops/cpu/vector/drivers.h"

namespace concerto::cpu {
namespace {

template <Isa isa>
struct LookUp {
  static void forward(const Context& ctx, const EmbeddingForward& a) {
    if (ctx.dry_run) return;
    const Rows table(a.table), y(a.y);
    const int32_t* ids = a.ids.as<int32_t>();
    const int64_t bytes = a.y.cols() * y.element, vocab = a.table.rows();
    const bool rounds = a.table.dtype != a.y.dtype;
    const RowTable& rows = kernel_table(isa).rows[type_index(a.y.dtype)];
    ctx.pool->parallel_for(a.y.rows(), grain_rows(bytes), [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t row = ids[t] - a.begin;
        if (a.slice && (row < 0 || row >= vocab))
          std::memset(y[t], 0, static_cast<size_t>(bytes));
        else if (rounds)
          rows.from_f32(reinterpret_cast<const float*>(table[row]), y[t], a.y.cols());
        else
          std::memcpy(y[t], table[row], static_cast<size_t>(bytes));
      }
    });
  }

  // A thread owns columns and walks all tokens, so that each sum is taken in token order.
  static void backward_weight(const Context& ctx, const EmbeddingBackwardWeight& a) {
    if (ctx.dry_run) return;
    const RowTable& t = kernel_table(isa).rows[type_index(a.dy.dtype)];
    const Rows dy(a.dy), dtable(a.dtable);
    const int32_t* ids = a.ids.as<int32_t>();
    const int64_t vocab = a.dtable.rows();
    ctx.pool->parallel_for(a.dy.cols(), 64, [&](int64_t begin, int64_t end, int) {
      for (int64_t token = 0; token < a.dy.rows(); ++token) {
        const int64_t row = ids[token] - a.begin;
        if (ids[token] == a.skip_id || (a.slice && (row < 0 || row >= vocab))) continue;
        t.accumulate(dy.at(token, begin), reinterpret_cast<float*>(dtable.at(row, begin)), end - begin);
      }
    });
  }

  static void fill(Backend& b) { b.embedding = {forward, backward_weight}; }
};

}  // namespace

void fill_embedding(Backend& backend, Isa isa) { fill_for<LookUp>(backend, isa); }

}  // namespace concerto::cpu
