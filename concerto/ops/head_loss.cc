// The head and its loss, a chunk of tokens at a time: made of other ops, so the same in every backend.
#include "concerto/ops/head_loss.h"

#include <algorithm>

#include "concerto/ops/backend.h"
#include "concerto/ops/checks.h"
#include "concerto/ops/cross_entropy.h"
#include "concerto/ops/linear.h"

namespace concerto {
namespace {

// A chunk of logits of about this size stays in the last-level cache between the product and the loss; the sums of
// weight gradients are cut at chunks, so the size depends on the vocabulary only, never on threads or on the number of
// tokens.
constexpr int64_t kChunkBytes = int64_t{8} << 20;
constexpr int64_t kChunkRows = 64;

void check_head(const Context& ctx, const HeadLoss& args) {
  check_compute(args.x, "head.x");
  check_rank(args.x, 2, "head.x");
  check_rank(args.w, 2, "head.w");
  const DType type = args.x.dtype, stat = stat_dtype(type);
  const int64_t tokens = args.x.dim(0), hidden = args.x.dim(1), vocab = args.w.dim(0);
  CHECK(vocab > 0, "vocabulary of {}", vocab);
  check_view(args.w, {vocab, hidden}, type, "head.w");
  if (is_given(args.bias)) check_view(args.bias, {vocab}, stat, "head.bias");
  check_view(args.targets, {tokens}, DType::kI32, "head.targets");
  check_view(args.loss_sum, {1}, DType::kF64, "head.loss_sum");
  if (is_given(args.dx)) check_compute_or_stat(args.dx, {tokens, hidden}, type, "head.dx");
  CHECK(is_given(args.dx) || (!is_given(args.dw) && !is_given(args.db)), "head.dw and head.db need head.dx");
  CHECK(is_given(args.dw) || !is_given(args.db), "head.db needs head.dw");
  if (is_given(args.dw)) check_view(args.dw, {vocab, hidden}, stat, "head.dw");
  if (is_given(args.db)) check_view(args.db, {vocab}, stat, "head.db");
  if (is_given(args.token_loss)) check_view(args.token_loss, {tokens}, stat, "head.token_loss");
  check_memory(ctx, {args.x, args.targets, args.loss_sum});
  check_weight_memory(ctx, args.w, args.packed, ctx.backend->linear.packing);
  check_apart(args.dx, {args.x, args.w, args.targets}, "head.dx");
}

// Elements [begin, begin + count) of a vector.
View slice(View v, int64_t begin, int64_t count) {
  View part = v;
  part.shape = Shape{count};
  part.row_stride = count;
  if (v.data) part.data = static_cast<char*>(v.data) + begin * dtype_bytes(v.dtype);
  return part;
}

}  // namespace

int64_t head_loss_chunk(int64_t vocab) {
  const int64_t rows = kChunkBytes / (vocab * dtype_bytes(DType::kF32));
  return std::max(kChunkRows, rows / kChunkRows * kChunkRows);
}

void head_loss(const Context& ctx, const HeadLoss& args) {
  const auto plain = [](const void*, const Context& c, const CrossEntropy& a) { cross_entropy(c, a); };
  head_loss_in_chunks(ctx, args, head_loss_chunk(std::max<int64_t>(1, args.w.dim(0))), {plain, nullptr});
}

void head_loss_in_chunks(const Context& ctx, const HeadLoss& args, int64_t most_rows, ChunkLoss chunk_loss) {
  check_head(ctx, args);
  const DType type = args.x.dtype, stat = stat_dtype(type);
  const int64_t tokens = args.x.dim(0), vocab = args.w.dim(0), chunk = std::min(most_rows, tokens);
  OpScope scope(ctx, OpFamily::kHead);
  if (tokens == 0) {  // a gradient that is written is zero
    if (is_given(args.dw) && !args.accumulate)
      linear_backward_weight(
          ctx, {.x = args.x, .dy = View(nullptr, {0, vocab}, type), .dw = args.dw, .db = {}, .accumulate = false});
    return;
  }
  ArenaScope arena(*ctx.scratch);
  const bool with_gradient = is_given(args.dx);
  const View logits = ctx.scratch->take({chunk, vocab}, stat);
  View dlogits;
  if (with_gradient) dlogits = type == stat ? logits : ctx.scratch->take({chunk, vocab}, type);
  for (int64_t begin = 0; begin < tokens; begin += chunk) {
    const int64_t rows = std::min(chunk, tokens - begin);
    const View x = args.x.rows_range(begin, rows);
    const View part = logits.rows_range(0, rows);
    linear_forward(ctx, {.x = x, .w = args.w, .bias = args.bias, .y = part, .packed = args.packed});
    CrossEntropy loss{.logits = part,
                      .targets = slice(args.targets, begin, rows),
                      .scale = args.scale,
                      .loss_sum = args.loss_sum,
                      .dlogits = {},
                      .token_loss = {}};
    if (with_gradient) loss.dlogits = dlogits.rows_range(0, rows);
    if (is_given(args.token_loss)) loss.token_loss = slice(args.token_loss, begin, rows);
    chunk_loss.fn(chunk_loss.self, ctx, loss);
    if (!with_gradient) continue;
    linear_backward_input(
        ctx, {.dy = loss.dlogits, .w = args.w, .dx = args.dx.rows_range(begin, rows), .packed = args.packed});
    if (is_given(args.dw))
      linear_backward_weight(
          ctx, {.x = x, .dy = loss.dlogits, .dw = args.dw, .db = args.db, .accumulate = args.accumulate || begin > 0});
  }
}

}  // namespace concerto
