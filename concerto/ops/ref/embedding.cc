#include "concerto/ops/ref/kernels.h"

namespace concerto::ref {
namespace {

void forward(const Context& ctx, const EmbeddingForward& a) {
  if (ctx.dry_run) return;
  if (!a.slice) check_ids(a.ids, a.table.dim(0), "embedding.ids");
  with_types(a.y.dtype, [&]<class C, class S>() {
    const auto run = [&]<class T>() {
      for (int64_t t = 0; t < a.ids.dim(0); ++t) {
        const int64_t row = a.ids.as<int32_t>()[t] - a.begin;
        const bool here = row >= 0 && row < a.table.dim(0);
        for (int64_t h = 0; h < a.table.dim(1); ++h)
          store(row_of<C>(a.y, t)[h], here ? load(row_of<T>(a.table, row)[h]) : 0.0);
      }
    };
    a.table.dtype == dtype_of<C>() ? run.template operator()<C>() : run.template operator()<S>();
  });
}

void backward_weight(const Context& ctx, const EmbeddingBackwardWeight& a) {
  if (ctx.dry_run) return;
  if (!a.slice) check_ids(a.ids, a.dtable.dim(0), "embedding.ids");
  with_types(a.dy.dtype, [&]<class C, class S>() {
    for (int64_t t = 0; t < a.ids.dim(0); ++t) {
      const int32_t id = a.ids.as<int32_t>()[t];
      if (id == a.skip_id || id < a.begin || id >= a.begin + a.dtable.dim(0)) continue;
      S* row = row_of<S>(a.dtable, id - a.begin);
      for (int64_t h = 0; h < a.dtable.dim(1); ++h) store(row[h], load(row[h]) + load(row_of<C>(a.dy, t)[h]));
    }
  });
}

}  // namespace

EmbeddingKernels embedding() { return {.forward = forward, .backward_weight = backward_weight}; }

}  // namespace concerto::ref
