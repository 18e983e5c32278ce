#include "concerto/ops/ref/kernels.h"

namespace concerto::ref {
namespace {

void forward(const Context& ctx, const EmbeddingForward& a) {
  if (ctx.dry_run) return;
  check_ids(a.ids, a.table.dim(0), "embedding.ids");
  with_types(a.y.dtype, [&]<class C, class S>() {
    const auto run = [&]<class T>() {
      for (int64_t t = 0; t < a.ids.dim(0); ++t)
        for (int64_t h = 0; h < a.table.dim(1); ++h)
          store(row_of<C>(a.y, t)[h], load(row_of<T>(a.table, a.ids.as<int32_t>()[t])[h]));
    };
    a.table.dtype == dtype_of<C>() ? run.template operator()<C>() : run.template operator()<S>();
  });
}

void backward_weight(const Context& ctx, const EmbeddingBackwardWeight& a) {
  if (ctx.dry_run) return;
  check_ids(a.ids, a.dtable.dim(0), "embedding.ids");
  with_types(a.dy.dtype, [&]<class C, class S>() {
    for (int64_t t = 0; t < a.ids.dim(0); ++t) {
      const int32_t id = a.ids.as<int32_t>()[t];
      if (id == a.skip_id) continue;
      S* row = row_of<S>(a.dtable, id);
      for (int64_t h = 0; h < a.dtable.dim(1); ++h) store(row[h], load(row[h]) + load(row_of<C>(a.dy, t)[h]));
    }
  });
}

}  // namespace

EmbeddingKernels embedding() { return {.forward = forward, .backward_weight = backward_weight}; }

}  // namespace concerto::ref
