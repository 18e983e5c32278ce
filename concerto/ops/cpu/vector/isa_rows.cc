// Kernels of one row each: norm, rotary embedding, gated activation, sums of rows, casts.
#include "concerto/ops/cpu/vector/simd.h"

namespace concerto::cpu::CONCERTO_VECTOR_ISA {
namespace {

template <class T>
float rms_norm(const void* x_, const float* w, float eps, void* y_, int64_t n) {
  const T* x = static_cast<const T*>(x_);
  T* y = static_cast<T*>(y_);
  Vec squares{};
  for_lanes(n, [&](int64_t i, auto m) {
    const Vec v = load(x + i, m);
    squares += v * v;
  });
  const float rstd = 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(n) + eps);
  for_lanes(n, [&](int64_t i, auto m) { store(y + i, load(w + i, m) * (load(x + i, m) * rstd), m); });
  return rstd;
}

template <class T>
void rms_norm_backward(const void* dy_, const void* x_, const float* w, float rstd, const void* residual_, void* dx_,
                       void* y_, int64_t n) {
  const T *dy = static_cast<const T*>(dy_), *x = static_cast<const T*>(x_),
          *residual = static_cast<const T*>(residual_);
  T *dx = static_cast<T*>(dx_), *y = static_cast<T*>(y_);
  Vec dot{};
  for_lanes(n, [&](int64_t i, auto m) { dot += load(dy + i, m) * load(w + i, m) * load(x + i, m); });
  const float slope = rstd * rstd * (sum(dot) / static_cast<float>(n));
  if (residual) {
    for_lanes(n, [&](int64_t i, auto m) {
      const Vec g = load(dy + i, m) * load(w + i, m);
      store(dx + i, (g - load(x + i, m) * slope) * rstd + load(residual + i, m), m);
    });
  } else {
    for_lanes(n, [&](int64_t i, auto m) {
      const Vec g = load(dy + i, m) * load(w + i, m);
      store(dx + i, (g - load(x + i, m) * slope) * rstd, m);
    });
  }
  if (y) for_lanes(n, [&](int64_t i, auto m) { store(y + i, load(w + i, m) * (load(x + i, m) * rstd), m); });
}

template <class T>
void rms_norm_weight(const void* dy_, const void* x_, float rstd, float* dw, int64_t n) {
  const T *dy = static_cast<const T*>(dy_), *x = static_cast<const T*>(x_);
  for_lanes(n,
            [&](int64_t i, auto m) { store(dw + i, load(dw + i, m) + load(dy + i, m) * (load(x + i, m) * rstd), m); });
}

// Lanes 2j and 2j + 1 as (even, even), (odd, odd) and (odd, even).
CONCERTO_INLINE Vec even_twice(Vec v) {
  IntVec pick;
  for (int i = 0; i < kLanes; ++i) pick[i] = i & ~1;
  return __builtin_shuffle(v, pick);
}
CONCERTO_INLINE Vec odd_twice(Vec v) {
  IntVec pick;
  for (int i = 0; i < kLanes; ++i) pick[i] = i | 1;
  return __builtin_shuffle(v, pick);
}
CONCERTO_INLINE Vec swap_pairs(Vec v) {
  IntVec pick;
  for (int i = 0; i < kLanes; ++i) pick[i] = i ^ 1;
  return __builtin_shuffle(v, pick);
}

template <class T>
void rope(void* x_, const float* cos_sin, int64_t heads, int64_t head_dim, bool inverse) {
  T* x = static_cast<T*>(x_);
  Vec sign;  // (x0, x1) -> (x0 c - x1 s, x1 c + x0 s)
  for (int i = 0; i < kLanes; ++i) sign[i] = (i % 2 == 0) != inverse ? -1.0f : 1.0f;
  for_lanes(head_dim, [&](int64_t i, auto m) {
    const Vec both = load(cos_sin + i, m), c = even_twice(both), s = odd_twice(both) * sign;
    T* p = x + i;
    for (int64_t h = 0; h < heads; ++h, p += head_dim) {
      const Vec v = load(p, m);
      store(p, v * c + swap_pairs(v) * s, m);
    }
  });
}

// Rows follow each other in memory, but each is a short stream of its own with much work an element: the hardware runs
// too little ahead.
template <class T>
CONCERTO_INLINE void prefetch_ahead(const T* p) {
  __builtin_prefetch(reinterpret_cast<const char*>(p) + 2048);
}

CONCERTO_INLINE Vec sigmoid(Vec v) { return 1.0f / (1.0f + exp(-v)); }

template <class T>
void swiglu(const void* gate_, const void* up_, float weight, void* act_, int64_t n) {
  const T *gate = static_cast<const T*>(gate_), *up = static_cast<const T*>(up_);
  T* act = static_cast<T*>(act_);
  for_lanes(n, [&](int64_t i, auto m) {
    prefetch_ahead(gate + i);
    prefetch_ahead(up + i);
    const Vec g = load(gate + i, m);
    store(act + i, g * sigmoid(g) * load(up + i, m) * weight, m);
  });
}

template <bool kAct, class T>
CONCERTO_INLINE float swiglu_backward_row(const T* gate, const T* up, const T* dact, float weight, T* dgate, T* dup,
                                          T* act, int64_t n) {
  Vec dot{};
  for_lanes(n, [&](int64_t i, auto m) {
    prefetch_ahead(gate + i);
    prefetch_ahead(up + i);
    prefetch_ahead(dact + i);
    const Vec g = load(gate + i, m), u = load(up + i, m), d = load(dact + i, m);
    const Vec s = sigmoid(g), silu = g * s, whole = silu * u, weighted = d * weight;
    dot += d * whole;
    store(dgate + i, weighted * u * (s + silu * (1.0f - s)), m);
    store(dup + i, weighted * silu, m);
    if (kAct) store(act + i, whole * weight, m);
  });
  return sum(dot);
}

template <class T>
float swiglu_backward(const void* gate_, const void* up_, const void* dact_, float weight, void* dgate_, void* dup_,
                      void* act_, int64_t n) {
  const T *gate = static_cast<const T*>(gate_), *up = static_cast<const T*>(up_), *dact = static_cast<const T*>(dact_);
  T *dgate = static_cast<T*>(dgate_), *dup = static_cast<T*>(dup_), *act = static_cast<T*>(act_);
  return act ? swiglu_backward_row<true>(gate, up, dact, weight, dgate, dup, act, n)
             : swiglu_backward_row<false>(gate, up, dact, weight, dgate, dup, act, n);
}

template <class T>
void add(const void* a_, const void* b_, void* out_, int64_t n) {
  const T *a = static_cast<const T*>(a_), *b = static_cast<const T*>(b_);
  T* out = static_cast<T*>(out_);
  for_lanes(n, [&](int64_t i, auto m) { store(out + i, load(a + i, m) + load(b + i, m), m); });
}

template <class T>
void accumulate(const void* x_, float* sum, int64_t n) {
  const T* x = static_cast<const T*>(x_);
  for_lanes(n, [&](int64_t i, auto m) { store(sum + i, load(sum + i, m) + load(x + i, m), m); });
}

// kVecs vectors of columns at a time: the rows lie anywhere, and each wants its lines to be asked for together.
template <int kVecs, class T, class M>
CONCERTO_INLINE void sum_columns(const T* rows, int64_t stride, const int32_t* index, int64_t count, const T* add1,
                                 const T* add2, T* y, int64_t i, M m) {
  Vec sum[kVecs];
#pragma GCC unroll 8
  for (int j = 0; j < kVecs; ++j) sum[j] = add1 ? load(add1 + i + j * kLanes, m) : Vec{};
  if (add2)
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) sum[j] += load(add2 + i + j * kLanes, m);
  for (int64_t r = 0; r < count; ++r) {
    const T* row = rows + index[r] * stride + i;
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) sum[j] += load(row + j * kLanes, m);
  }
#pragma GCC unroll 8
  for (int j = 0; j < kVecs; ++j) store(y + i + j * kLanes, sum[j], m);
}

template <class T>
void sum_rows(const void* rows_, int64_t stride, const int32_t* index, int64_t count, int64_t ahead, const void* add1_,
              const void* add2_, void* y_, int64_t n) {
  const T *rows = static_cast<const T*>(rows_), *add1 = static_cast<const T*>(add1_),
          *add2 = static_cast<const T*>(add2_);
  T* y = static_cast<T*>(y_);
  for (int64_t r = count; r < count + ahead; ++r) {
    const char* row = reinterpret_cast<const char*>(rows + index[r] * stride);
    for (int64_t at = 0; at < n * static_cast<int64_t>(sizeof(T)); at += 64) __builtin_prefetch(row + at);
  }
  constexpr int kVecs = 4;
  const int64_t whole = n / (kVecs * kLanes) * (kVecs * kLanes);
  for (int64_t i = 0; i < whole; i += kVecs * kLanes)
    sum_columns<kVecs>(rows, stride, index, count, add1, add2, y, i, All{});
  for_lanes(n - whole,
            [&](int64_t i, auto m) { sum_columns<1>(rows, stride, index, count, add1, add2, y, whole + i, m); });
}

template <class T>
void to_f32(const void* x_, float* y, int64_t n) {
  const T* x = static_cast<const T*>(x_);
  for_lanes(n, [&](int64_t i, auto m) { store(y + i, load(x + i, m), m); });
}
template <class T>
void from_f32(const float* x, void* y_, int64_t n) {
  T* y = static_cast<T*>(y_);
  for_lanes(n, [&](int64_t i, auto m) { store_exact(y + i, load(x + i, m), m); });
}

template <class T>
constexpr RowTable rows_of() {
  return {rms_norm<T>, rms_norm_backward<T>, rms_norm_weight<T>, rope<T>,   swiglu<T>,  swiglu_backward<T>,
          add<T>,      accumulate<T>,        sum_rows<T>,        to_f32<T>, from_f32<T>};
}

}  // namespace

extern const RowTable kRows[2];
const RowTable kRows[2] = {rows_of<float>(), rows_of<uint16_t>()};

}  // namespace concerto::cpu::CONCERTO_VECTOR_ISA
