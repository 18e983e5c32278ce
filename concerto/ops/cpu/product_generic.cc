// Product kernels for any processor: plain loops that the compiler vectorises for its baseline.
#include "concerto/ops/cpu/product_kernels.h"

namespace concerto::cpu {
namespace {

constexpr int kUnit = 1, kRows = 4, kVectors = 2;

struct Bits16;

struct Vec {
  static constexpr int64_t kLanes = 4;
  struct Sum {
    float lane[kLanes];
  };
  using Words = Sum;
  static Sum zero() { return {}; }
  static Sum add(Sum a, Sum b) {
    for (int i = 0; i < kLanes; ++i) a.lane[i] += b.lane[i];
    return a;
  }
  static Sum load(const float* p) { return {{p[0], p[1], p[2], p[3]}}; }
  static void store(float* p, Sum x) {
    for (int i = 0; i < kLanes; ++i) p[i] = x.lane[i];
  }
  static void stream(float* p, Sum x) { store(p, x); }
  static void settle() {}
  static void store_bf16(Bits16* p, Sum x);
  static Words load_words(const uint32_t* p) {
    Words w;
    __builtin_memcpy(&w, p, sizeof w);
    return w;
  }
  static Words broadcast(const void* p) {
    float x;
    __builtin_memcpy(&x, p, sizeof x);
    return {{x, x, x, x}};
  }
  static Sum multiply_add(Sum s, Words a, Words b) {
    for (int i = 0; i < kLanes; ++i) s.lane[i] += a.lane[i] * b.lane[i];
    return s;
  }
};

template <class S, bool kStream = false>
void pack_block(const S* from, int64_t stride, int64_t n, int64_t k, uint32_t* to, int64_t row_words);
template <class S, int64_t kWidth, bool kStream = false>
void pack_lines(const S* from, int64_t stride, int64_t n, int64_t k, uint32_t* to);

#include "concerto/ops/cpu/product_kernels_body.h"
#include "concerto/ops/cpu/product_vector_body.h"

template <class S, bool kStream>
void pack_block(const S* from, int64_t stride, int64_t n, int64_t k, uint32_t* to, int64_t row_words) {
  pack_block_plain(from, stride, n, k, to, row_words);
}

template <class S, int64_t kWidth, bool kStream>
void pack_lines(const S* from, int64_t stride, int64_t n, int64_t k, uint32_t* to) {
  pack_lines_plain<S, kWidth>(from, stride, n, k, to);
}

inline void Vec::store_bf16(Bits16* p, Sum x) {
  for (int i = 0; i < kLanes; ++i) from_float(x.lane[i], p + i);
}

constexpr ProductKernels kTable = make_table();

}  // namespace

const ProductKernels* product_kernels_generic() { return &kTable; }

}  // namespace concerto::cpu
