#include "concerto/ops/attention.h"

#include "concerto/ops/backend.h"
#include "concerto/ops/checks.h"

namespace concerto {
namespace {

template <class Args>
void check_heads(const Args& args) {
  CHECK(args.num_heads > 0 && args.num_kv_heads > 0 && args.head_dim > 0 && args.num_heads % args.num_kv_heads == 0,
        "{} heads, {} kv heads of {}", args.num_heads, args.num_kv_heads, args.head_dim);
  CHECK(args.scale > 0, "scale {}", args.scale);
}

void check_offsets(const View& offsets, int64_t rows) {
  check_rank(offsets, 1, "attention.doc_offsets");
  CHECK(offsets.dtype == DType::kI32, "attention.doc_offsets is {}", dtype_name(offsets.dtype));
  CHECK(offsets.dim(0) >= (rows ? 2 : 1), "attention.doc_offsets has {} entries", offsets.dim(0));
}

}  // namespace

void attention_forward(const Context& ctx, const AttentionForward& args) {
  check_compute(args.q, "attention.q");
  check_rank(args.q, 2, "attention.q");
  check_heads(args);
  const DType type = args.q.dtype;
  const int64_t rows = args.q.dim(0), q_cols = args.num_heads * args.head_dim,
                kv_cols = args.num_kv_heads * args.head_dim;
  check_view(args.q, {rows, q_cols}, type, "attention.q");
  check_view(args.k, {rows, kv_cols}, type, "attention.k");
  check_view(args.v, {rows, kv_cols}, type, "attention.v");
  check_offsets(args.doc_offsets, rows);
  check_view(args.out, {rows, q_cols}, type, "attention.out");
  check_view(args.lse, {rows, args.num_heads}, stat_dtype(type), "attention.lse");
  check_memory(ctx, {args.q, args.k, args.v, args.doc_offsets, args.out, args.lse});
  check_apart(args.out, {args.q, args.k, args.v, args.lse}, "attention.out");
  if (rows == 0) return;
  run_kernel(ctx, OpFamily::kAttention, ctx.backend->attention.forward, args, "attention_forward");
}

void attention_backward(const Context& ctx, const AttentionBackward& args) {
  check_compute(args.q, "attention.q");
  check_rank(args.q, 2, "attention.q");
  check_heads(args);
  const DType type = args.q.dtype;
  const int64_t rows = args.q.dim(0), q_cols = args.num_heads * args.head_dim,
                kv_cols = args.num_kv_heads * args.head_dim;
  check_view(args.q, {rows, q_cols}, type, "attention.q");
  check_view(args.k, {rows, kv_cols}, type, "attention.k");
  check_view(args.v, {rows, kv_cols}, type, "attention.v");
  check_view(args.out, {rows, q_cols}, type, "attention.out");
  check_view(args.dout, {rows, q_cols}, type, "attention.dout");
  check_view(args.lse, {rows, args.num_heads}, stat_dtype(type), "attention.lse");
  check_offsets(args.doc_offsets, rows);
  check_view(args.dq, {rows, q_cols}, type, "attention.dq");
  check_view(args.dk, {rows, kv_cols}, type, "attention.dk");
  check_view(args.dv, {rows, kv_cols}, type, "attention.dv");
  check_memory(ctx,
               {args.dout, args.q, args.k, args.v, args.out, args.lse, args.doc_offsets, args.dq, args.dk, args.dv});
  for (const View& grad : {args.dq, args.dk, args.dv})
    check_apart(grad, {args.q, args.k, args.v, args.out, args.dout, args.lse}, "attention gradient");
  check_apart(args.dq, {args.dk, args.dv}, "attention.dq");
  check_apart(args.dk, {args.dv}, "attention.dk");
  if (rows == 0) return;
  run_kernel(ctx, OpFamily::kAttention, ctx.backend->attention.backward, args, "attention_backward");
}

void attention_cached(const Context& ctx, const AttentionCached& args) {
  check_compute(args.q, "attention.q");
  check_rank(args.q, 2, "attention.q");
  check_rank(args.k_cache, 2, "attention.k_cache");
  check_heads(args);
  const DType type = args.q.dtype;
  const int64_t rows = args.q.dim(0), q_cols = args.num_heads * args.head_dim,
                kv_cols = args.num_kv_heads * args.head_dim;
  const int64_t cache_rows = args.k_cache.dim(0);
  CHECK(args.past >= 0 && cache_rows >= args.past + rows, "cache of {} rows, {} past, {} new", cache_rows, args.past,
        rows);
  check_view(args.q, {rows, q_cols}, type, "attention.q");
  check_view(args.k_cache, {cache_rows, kv_cols}, type, "attention.k_cache");
  check_view(args.v_cache, {cache_rows, kv_cols}, type, "attention.v_cache");
  check_view(args.out, {rows, q_cols}, type, "attention.out");
  check_memory(ctx, {args.q, args.k_cache, args.v_cache, args.out});
  check_apart(args.out, {args.q, args.k_cache, args.v_cache}, "attention.out");
  if (rows == 0) return;
  run_kernel(ctx, OpFamily::kAttention, ctx.backend->attention.cached, args, "attention_cached");
}

}  // namespace concerto
