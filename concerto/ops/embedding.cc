#include "concerto/ops/embedding.h"

#include "concerto/ops/backend.h"
#include "concerto/ops/checks.h"

namespace concerto {

void embedding_forward(const Context& ctx, const EmbeddingForward& args) {
  check_compute(args.y, "embedding.y");
  check_rank(args.table, 2, "embedding.table");
  check_rank(args.ids, 1, "embedding.ids");
  const int64_t tokens = args.ids.dim(0);
  check_view(args.ids, {tokens}, DType::kI32, "embedding.ids");
  check_view(args.y, {tokens, args.table.dim(1)}, args.y.dtype, "embedding.y");
  check_compute_or_stat(args.table, args.table.shape, args.y.dtype, "embedding.table");
  check_memory(ctx, {args.ids, args.table, args.y});
  check_apart(args.y, {args.ids, args.table}, "embedding.y");
  CHECK(args.slice ? args.begin >= 0 : args.begin == 0, "embedding.begin is {}", args.begin);
  if (tokens == 0) return;
  run_kernel(ctx, OpFamily::kEmbedding, ctx.backend->embedding.forward, args, "embedding_forward");
}

void embedding_backward_weight(const Context& ctx, const EmbeddingBackwardWeight& args) {
  check_compute(args.dy, "embedding.dy");
  check_rank(args.dtable, 2, "embedding.dtable");
  check_rank(args.ids, 1, "embedding.ids");
  const int64_t tokens = args.ids.dim(0), hidden = args.dtable.dim(1);
  check_view(args.ids, {tokens}, DType::kI32, "embedding.ids");
  check_view(args.dy, {tokens, hidden}, args.dy.dtype, "embedding.dy");
  check_view(args.dtable, {args.dtable.dim(0), hidden}, stat_dtype(args.dy.dtype), "embedding.dtable");
  check_memory(ctx, {args.ids, args.dy, args.dtable});
  check_apart(args.dtable, {args.ids, args.dy}, "embedding.dtable");
  CHECK(args.slice ? args.begin >= 0 : args.begin == 0, "embedding.begin is {}", args.begin);
  if (tokens == 0) return;
  run_kernel(ctx, OpFamily::kEmbedding, ctx.backend->embedding.backward_weight, args, "embedding_backward_weight");
}

}  // namespace concerto
