// The table of attention for each compute type.
#include "concerto/ops/cpu/vector/isa_attention.h"

#include "concerto/ops/cpu/vector/isa_attention_backward.h"
#include "concerto/ops/cpu/vector/isa_attention_forward.h"

namespace concerto::cpu::CONCERTO_VECTOR_ISA {
namespace {

template <class T>
void pack_block(const void* k_, int64_t k_stride, const void* v_, int64_t v_stride, int64_t keys, int64_t width,
                int64_t dim, const AttentionTable::Packs& to, void* work) {
  typedef typename Packed<T>::Element E;
  const T *k = static_cast<const T*>(k_), *v = static_cast<const T*>(v_);
  E* room = static_cast<E*>(work);
  if (to.k_by_dim) pack_by_dim(k, k_stride, keys, width, dim, static_cast<E*>(to.k_by_dim), room);
  if (to.k_by_key) pack_by_key(k, k_stride, keys, width, dim, static_cast<E*>(to.k_by_key));
  if (to.v_by_dim) pack_by_dim(v, v_stride, keys, width, dim, static_cast<E*>(to.v_by_dim), room);
  if (to.v_by_key) pack_by_key(v, v_stride, keys, width, dim, static_cast<E*>(to.v_by_key));
}

template <class T>
int64_t work_bytes(int64_t dim) {
  const int64_t forward = ForwardWork<T>(nullptr, dim).bytes, backward = BackwardWork<T>(nullptr, dim).bytes;
  const int64_t pack = kKeyBlock * padded_dim(dim) * 4;
  const int64_t most = forward > backward ? forward : backward;
  return most > pack ? most : pack;
}

template <class T>
float dot(const void* a_, const void* b_, int64_t n) {
  const T *a = static_cast<const T*>(a_), *b = static_cast<const T*>(b_);
  Vec total{};
  for_lanes(n, [&](int64_t i, auto m) { total += load(a + i, m) * load(b + i, m); });
  return sum(total);
}

template <class T>
constexpr AttentionTable attention_of() {
  typedef typename Packed<T>::Element E;
  return {.element_bytes = sizeof(E) / kStep<E>,
          .key_block = kKeyBlock,
          .forward_queries = kForwardQueries,
          .backward_queries = kBackwardQueries,
          .work_bytes = work_bytes<T>,
          .pack_block = pack_block<T>,
          .forward = attention_forward<T>,
          .load_queries = load_queries<T>,
          .meet = meet<T>,
          .store_dq = store_dq<T>,
          .store_transposed = store_transposed<T>,
          .dot = dot<T>,
          .cached = attention_cached<T>};
}

}  // namespace

extern const AttentionTable kAttention[2];
const AttentionTable kAttention[2] = {attention_of<float>(), attention_of<uint16_t>()};

}  // namespace concerto::cpu::CONCERTO_VECTOR_ISA
