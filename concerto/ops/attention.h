// Causal attention inside documents (block-diagonal causal), grouped-query: KV head g serves query heads g * (N / N_kv)
// and following. Softmax in the stat type. Work outside a document is skipped, not masked. No [seq, seq] buffer in the
// cpu backend (online softmax, Dao et al. 2022; backward recomputes scores from lse).
#pragma once

#include "concerto/ops/context.h"

namespace concerto {

struct AttentionForward {
  View q;            // [T, N * D] compute, strided rows allowed
  View k, v;         // [T, N_kv * D] compute, strided rows allowed
  View doc_offsets;  // [docs + 1] i32: token ranges, offsets[0] = 0, offsets[docs] = T; empty ranges allowed
  int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0;
  double scale = 0;  // head_dim^-0.5
  View out;          // [T, N * D] compute
  View lse;          // [T, N] stat: log(sum(exp(scale * q k)))
};
struct AttentionBackward {
  View dout;          // [T, N * D] compute
  View q, k, v, out;  // as in forward
  View lse;           // [T, N] stat
  View doc_offsets;
  int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0;
  double scale = 0;
  View dq, dk, dv;  // like q, k, v; overwritten; strided rows allowed
};
// New tokens against a cache, for generation: query i of n sees cache rows [0, past + i].
struct AttentionCached {
  View q;                 // [n, N * D] compute
  View k_cache, v_cache;  // [>= past + n, N_kv * D] compute, the new rows already in place
  int64_t past = 0;
  int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0;
  double scale = 0;
  View out;  // [n, N * D] compute
};

struct AttentionKernels {
  void (*forward)(const Context&, const AttentionForward&) = nullptr;
  void (*backward)(const Context&, const AttentionBackward&) = nullptr;
  void (*cached)(const Context&, const AttentionCached&) = nullptr;
};

void attention_forward(const Context& ctx, const AttentionForward& args);
void attention_backward(const Context& ctx, const AttentionBackward& args);
void attention_cached(const Context& ctx, const AttentionCached& args);

}  // namespace concerto
