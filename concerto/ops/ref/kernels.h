// What the files of the reference backend share: loads and stores through double, the choice of types, rows over the
// pool. One file an op.
#pragma once

#include <cmath>
#include <cstdint>

#include "concerto/ops/backend.h"
#include "concerto/ops/checks.h"

namespace concerto::ref {

inline double load(float v) { return v; }
inline double load(double v) { return v; }
inline double load(bf16 v) { return static_cast<float>(v); }

inline void store(float& to, double v) { to = static_cast<float>(v); }
inline void store(double& to, double v) { to = v; }
// Through a float rounded to odd, so that the two roundings make one.
inline void store(bf16& to, double v) {
  float f = static_cast<float>(v);
  if (static_cast<double>(f) != v && std::isfinite(f)) {
    if (std::fabs(static_cast<double>(f)) > std::fabs(v)) f = std::nextafterf(f, 0.0f);
    f = std::bit_cast<float>(std::bit_cast<uint32_t>(f) | 1u);
  }
  to = bf16(f);
}

template <class T>
T* row_of(const View& v, int64_t row) {
  return v.as<T>() + row * v.row_stride;
}

// fn<C, S>() with the compute type and its stat type.
template <class F>
void with_types(DType compute, F&& fn) {
  switch (compute) {
    case DType::kF32:
      return fn.template operator()<float, float>();
    case DType::kBF16:
      return fn.template operator()<bf16, float>();
    case DType::kF64:
      return fn.template operator()<double, double>();
    default:
      CHECK(false, "compute type {}", dtype_name(compute));
  }
}
template <class F>
void with_stat(DType stat, F&& fn) {
  if (stat == DType::kF64) return fn.template operator()<double>();
  CHECK(stat == DType::kF32, "stat type {}", dtype_name(stat));
  fn.template operator()<float>();
}

// fn(row, thread) for independent rows.
template <class F>
void for_rows(const Context& ctx, int64_t rows, F&& fn) {
  ctx.pool->parallel_for(rows, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t r = begin; r < end; ++r) fn(r, thread);
  });
}

// The reference looks at what the fast backends trust.
void check_offsets(const View& offsets, int64_t rows, bool all_rows);
void check_ids(const View& ids, int64_t end, const char* name);

LinearKernels linear();
GroupedLinearKernels grouped_linear();
RmsNormKernels rms_norm();
RopeKernels rope();
AttentionKernels attention();
SwigluKernels swiglu();
EmbeddingKernels embedding();
RouterKernels router();
RoutingKernels routing();
PermuteKernels permute();
CrossEntropyKernels cross_entropy();
ElementwiseKernels elementwise();
OptimizerKernels optimizer();

}  // namespace concerto::ref
