// What is compiled once per instruction set: plain functions on raw pointers, one row or one block at a time. The
// drivers beside (norm.cc, attention.cc,
// ...) are compiled once for the base processor; they walk views, take scratch and split work over threads.
//
// The sources of these functions (isa_*.cc) include nothing with inline functions of ours or of the standard library:
// such a function would be emitted with the instructions of the highest set, and the linker may keep that copy for
// everybody. bf16 is therefore plain uint16_t there.
//
// `void*` elements are of the compute type of the table: [0] f32, [1] bf16. Rows are contiguous, n counts elements,
// strides are in elements.
#pragma once

#include <stdint.h>

#include "concerto/ops/cpu/isa.h"

namespace concerto::cpu {

struct RowTable {
  float (*rms_norm)(const void* x, const float* w, float eps, void* y, int64_t n);  // returns rstd
  // residual and y, what rms_norm gave, may be null.
  void (*rms_norm_backward)(const void* dy, const void* x, const float* w, float rstd, const void* residual, void* dx,
                            void* y, int64_t n);
  void (*rms_norm_weight)(const void* dy, const void* x, float rstd, float* dw, int64_t n);  // dw += dy * x * rstd
  void (*rope)(void* x, const float* cos_sin, int64_t heads, int64_t head_dim, bool inverse);
  void (*swiglu)(const void* gate, const void* up, float weight, void* act, int64_t n);
  // Returns dot(dact, silu(gate) * up); act may be null, or dact.
  float (*swiglu_backward)(const void* gate, const void* up, const void* dact, float weight, void* dgate, void* dup,
                           void* act, int64_t n);
  void (*add)(const void* a, const void* b, void* out, int64_t n);
  void (*accumulate)(const void* x, float* sum, int64_t n);  // sum += x
  // y = add1 + add2 + sum over j of rows[index[j]]; an add may be null. The `ahead` indices after those are of the next
  // call: their rows are fetched meanwhile.
  void (*sum_rows)(const void* rows, int64_t stride, const int32_t* index, int64_t count, int64_t ahead,
                   const void* add1, const void* add2, void* y, int64_t n);
  void (*to_f32)(const void* x, float* y, int64_t n);
  void (*from_f32)(const float* x, void* y, int64_t n);
};

struct SoftmaxTable {
  double (*log_sum_exp)(const float* x, int64_t n);
  // dlogits = scale * (exp(logits - lse) - onehot(target)), as f32 (may be the logits) or bf16; a target outside [0, n)
  // hits nothing.
  void (*cross_entropy_grad[2])(const float* logits, float lse, float scale, int64_t target, void* dlogits, int64_t n);
  void (*softmax)(const float* x, float* p, int64_t n);
  void (*softmax_backward)(const float* p, const float* dp, float* dx,
                           int64_t n);  // dx = p * (dp - dot(p, dp)); dx may be dp
  // The k largest of s (destroyed), largest first, ties to the lower index; always k different indices, NaN last.
  void (*top_k)(float* s, int64_t n, int64_t k, int32_t* ids);
  void (*add_to_double)(const float* x, double* sum, int64_t n);  // sum += x
  void (*exp)(const float* x, float* y, int64_t n);
};

struct AdamScalars {
  float lr, beta1, beta2, rest1, rest2;  // rest: 1 - beta
  float eps, weight_decay, inverse_c1, inverse_sqrt_c2, grad_scale;
  float trust_ratio;  // LAMB's second pass
  // Of the random bits that round bf16 moments: key, and the first element's place in its tensor.
  uint32_t key_first, key_second, element;
};

// Moments are f32 or bf16.
struct OptimizerTable {
  void (*adamw)(float* w, void* m, void* v, const float* grad, void* copy, int64_t n,
                const AdamScalars& s);  // copy may be null
  void (*lamb_apply)(float* w, const void* m, const void* v, void* copy, int64_t n,
                     const AdamScalars& s);  // copy may be null
  // sums[0] += |w|^2, sums[1] += |u|^2
  void (*lamb_norms)(const float* w, void* m, void* v, const float* grad, int64_t n, const AdamScalars& s,
                     double* sums);
  double (*sum_squares)(const float* x, int64_t n);
};

// Attention of one head. Keys of a document are packed in blocks of `key_block`, the last one narrower (a multiple of
// kKeyGroup, filled up with zeros), for the products that need them. A block's four packs hold width * padded_dim(dim)
// numbers of `element_bytes` each; blocks follow each other without gaps, so block b of a document starts key_block * b
// * padded_dim(dim) numbers after the document's first.
struct AttentionTable {
  int64_t element_bytes;
  int64_t key_block;                   // keys in a block
  int64_t forward_queries;             // most query rows of a forward item
  int64_t backward_queries;            // most query rows of a backward item: divides key_block or is it
  int64_t (*work_bytes)(int64_t dim);  // scratch of a thread, for any of the calls below

  struct Packs {
    void* k_by_dim;  // k summed over dim: scores
    void* k_by_key;  // k summed over keys: dq; may be null
    void* v_by_dim;  // v summed over dim: dout v; may be null
    void* v_by_key;  // v summed over keys: out; may be null
  };
  void (*pack_block)(const void* k, int64_t k_stride, const void* v, int64_t v_stride, int64_t keys, int64_t width,
                     int64_t dim, const Packs& to, void* work);

  // Query rows [begin, begin + rows) of a document of `document` keys. Element strides.
  void (*forward)(const void* q, int64_t q_stride, int64_t begin, int64_t rows, int64_t document, int64_t dim,
                  float scale, const Packs& packs, void* out, int64_t out_stride, float* lse, int64_t lse_stride,
                  void* work);

  // Backward keeps one block of query rows in `work`: load it, meet key blocks, store its dq. dk and dv of a key block
  // collect in f32, transposed [dim][width], and are rounded once at the end.
  void (*load_queries)(const void* q, int64_t q_stride, const void* dout, int64_t dout_stride, const float* lse,
                       int64_t lse_stride, const float* delta, int64_t delta_stride, int64_t rows, int64_t dim,
                       void* work);
  // Query rows [begin, begin + rows) meet keys [key_begin, key_begin + width); dk and dv are both given or both null;
  // dq collects if want_dq.
  void (*meet)(int64_t begin, int64_t rows, int64_t key_begin, int64_t width, int64_t dim, float scale,
               const Packs& block, float* dk, float* dv, bool want_dq, void* work);
  void (*store_dq)(int64_t rows, int64_t dim, void* dq, int64_t dq_stride, void* work);
  void (*store_transposed)(const float* sums, int64_t keys, int64_t width, int64_t dim, void* rows, int64_t stride);

  float (*dot)(const void* a, const void* b, int64_t n);
  // One query against rows [0, keys) of a cache.
  void (*cached)(const void* q, const void* k, int64_t k_stride, const void* v, int64_t v_stride, int64_t keys,
                 int64_t dim, float scale, void* out, void* work);
};

constexpr int64_t kKeyGroup = 16;
constexpr int64_t padded_dim(int64_t dim) { return (dim + 15) / 16 * 16; }

struct KernelTable {
  const RowTable* rows;  // [2] by compute type
  const SoftmaxTable* softmax;
  const OptimizerTable* optimizer;  // [4] by the type of the copy + 2 x that of the moments
  const AttentionTable* attention;  // [2] by compute type
};
const KernelTable& kernel_table(Isa isa);

}  // namespace concerto::cpu
