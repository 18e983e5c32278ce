// What the tests of products share: tensors with guarded memory, runs with exact scratch, tolerances.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "concerto/ops/backend.h"
#include "concerto/ops/cpu/isa.h"

namespace concerto::cpu {

// Levels that product_test.cc runs; each of its programs has its own.
std::vector<Isa> levels_under_test();

// A tensor with its memory; rows `gap` elements longer than the shape, guarded by a pattern that must survive.
class Tensor {
 public:
  Tensor(Shape shape, DType type, int64_t gap = 0) : view_(nullptr, shape, type), gap_(gap) {
    view_.row_stride = view_.cols() + gap;
    bytes_.assign(static_cast<size_t>(view_.rows() * view_.row_stride * dtype_bytes(type) + 64), 0x5a);
    view_.data = bytes_.data();
  }
  static Tensor random(Shape shape, DType type, uint64_t seed, int64_t gap = 0) {
    Tensor t(shape, type, gap);
    for (int64_t i = 0; i < t.view_.elements(); ++i) {
      seed = seed * 6364136223846793005u + 1442695040888963407u;
      t.set(i, static_cast<double>(static_cast<int64_t>(seed) >> 20) / static_cast<double>(int64_t{1} << 43));
    }
    return t;
  }
  static Tensor i32(const std::vector<int32_t>& values) {
    Tensor t({static_cast<int64_t>(values.size())}, DType::kI32);
    std::memcpy(t.view_.data, values.data(), values.size() * 4);
    return t;
  }
  View view() const { return view_; }
  double get(int64_t i) const {
    const int64_t at = i / view_.cols() * view_.row_stride + i % view_.cols();
    if (view_.dtype == DType::kBF16) return static_cast<float>(view_.as<bf16>()[at]);
    return view_.as<float>()[at];
  }
  void set(int64_t i, double x) {
    const int64_t at = i / view_.cols() * view_.row_stride + i % view_.cols();
    if (view_.dtype == DType::kBF16)
      view_.as<bf16>()[at] = bf16(static_cast<float>(x));
    else
      view_.as<float>()[at] = static_cast<float>(x);
  }
  bool operator==(const Tensor& o) const { return bytes_ == o.bytes_; }
  bool guards_whole() const {
    const auto* p = bytes_.data();
    const int64_t size = dtype_bytes(view_.dtype), row = view_.row_stride * size;
    for (int64_t r = 0; r < view_.rows(); ++r)
      for (int64_t i = view_.cols() * size; i < row; ++i)
        if (p[r * row + i] != 0x5a) return false;
    for (size_t i = static_cast<size_t>(view_.rows() * row); i < bytes_.size(); ++i)
      if (p[i] != 0x5a) return false;
    return true;
  }

 private:
  View view_;
  int64_t gap_;
  std::vector<unsigned char> bytes_;

 public:
  Tensor(const Tensor& o) : view_(o.view_), gap_(o.gap_), bytes_(o.bytes_) { view_.data = bytes_.data(); }
  Tensor(Tensor&& o) noexcept : view_(o.view_), gap_(o.gap_), bytes_(std::move(o.bytes_)) {
    view_.data = bytes_.data();
  }
  Tensor& operator=(const Tensor&) = delete;
};

inline Context context_of(const Backend& backend, ThreadPool& pool, Arena& scratch) {
  Context ctx;
  ctx.backend = &backend;
  ctx.pool = &pool;
  ctx.scratch = &scratch;
  return ctx;
}

// Runs an op with the scratch that a dry run asked for and no byte more, poisoned.
template <class Op>
void run(const Backend& backend, int threads, Op&& op) {
  ThreadPool pool(threads);
  Arena count;
  Context dry = context_of(backend, pool, count);
  dry.dry_run = true;
  op(dry);
  Arena arena(count.high_water() + 64);
  arena.poison();
  op(context_of(backend, pool, arena));
  EXPECT_EQ(arena.high_water(), count.high_water());
}

// Inputs lie in [-1, 1]: a sum of k products in f32 is off by at most eps * k^2 / 2; in practice by far less than eps *
// k. One bf16 rounding on each side.
inline void expect_near(const Tensor& got, const Tensor& want, int64_t k, const std::string& what) {
  const double eps = std::numeric_limits<float>::epsilon() * static_cast<double>(k + 8);
  const double relative = got.view().dtype == DType::kBF16 ? std::ldexp(1.0, -7) : 0;
  for (int64_t i = 0; i < got.view().elements(); ++i) {
    const double g = got.get(i), w = want.get(i);
    ASSERT_LE(std::abs(g - w), eps + relative * std::abs(w)) << what << " element " << i << ": " << g << " for " << w;
  }
  EXPECT_TRUE(got.guards_whole()) << what;
}

}  // namespace concerto::cpu
