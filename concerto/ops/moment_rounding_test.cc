// Moments in bf16: the same draws on every backend and cut, and no small change lost.
#include "concerto/ops/moment_rounding.h"

#include <cmath>

#include "concerto/ops/op_test.h"
#include "concerto/ops/optimizer_step.h"

namespace concerto::test {
namespace {

using Bits = std::vector<uint16_t>;

// Two moments in bf16 that go through steps on one backend.
struct Moments {
  explicit Moments(int64_t n, float m_start = 0, float v_start = 0)
      : w(static_cast<size_t>(n), 1.0f),
        grad(static_cast<size_t>(n), 0.0f),
        m(static_cast<size_t>(n), bf16(m_start)),
        v(static_cast<size_t>(n), bf16(v_start)),
        copy(static_cast<size_t>(n)) {}

  AdamStep args() {
    keys.clear();
    for (const uint64_t stream : streams) keys.push_back(rounding_key(7, stream, step));
    const auto n = static_cast<int64_t>(w.size());
    return {.w = View(w.data(), {n}, DType::kF32),
            .m = View(m.data(), {n}, DType::kBF16),
            .v = View(v.data(), {n}, DType::kBF16),
            .grad = View(grad.data(), {n}, DType::kF32),
            .copy = View(copy.data(), {n}, DType::kBF16),
            .lr = 1e-3,
            .beta1 = 0.9,
            .beta2 = 0.999,
            .weight_decay = 0.1,
            .c1 = 0.5,
            .c2 = 0.25,
            .rounding = {.keys = keys.data(),
                         .ends = ends.empty() ? nullptr : ends.data(),
                         .count = static_cast<int64_t>(ends.size())}};
  }

  std::vector<float> w, grad;
  std::vector<bf16> m, v, copy;
  uint64_t step = 1;
  std::vector<uint64_t> streams{11};
  std::vector<RoundingKey> keys;
  std::vector<int64_t> ends{static_cast<int64_t>(w.size())};
};

Bits bits_of(const std::vector<bf16>& x) {
  Bits bits;
  for (const bf16 b : x) bits.push_back(b.bits);
  return bits;
}

using Op = void (*)(const Context&, const AdamStep&);

void run(const Backend& backend, int threads, Op op, const AdamStep& args) {
  ThreadPool pool(threads);
  Arena scratch(1 << 20);
  op({.backend = &backend, .pool = &pool, .scratch = &scratch}, args);
}

class MomentsInBf16 : public OpTest {};

std::vector<BackendCase> bf16_cases() {
  std::vector<BackendCase> cases = backend_cases();
  std::erase_if(cases, [](const BackendCase& c) { return c.type != DType::kBF16; });
  return cases;
}

// A second moment whose gradient is gone decays by 0.1 % a step at beta2 = 0.999: less than half a step of bf16 (0.2 to
// 0.4 %), so rounding to nearest never moves it. Rounded stochastically, its mean follows the formula.
TEST_P(MomentsInBf16, ASmallDecayIsNotLost) {
  constexpr int kSteps = 400, kElements = 4096;
  bf16 nearest(1.0f);
  for (int i = 0; i < kSteps; ++i) nearest = bf16(0.999f * static_cast<float>(nearest));
  EXPECT_EQ(static_cast<float>(nearest), 1.0f);
  for (Op op : {adamw_step, lamb_step}) {
    Moments x(kElements, 0, 1);
    for (x.step = 1; x.step <= kSteps; ++x.step) run(backend(), 1, op, x.args());
    double mean = 0;
    for (const bf16 v : x.v) mean += static_cast<double>(static_cast<float>(v)) / kElements;
    // One element's deviation is below sqrt(steps) x half a step of bf16 (1 / 512), their mean's 64 times smaller.
    EXPECT_NEAR(mean, std::pow(0.999, kSteps), 4 * std::sqrt(kSteps) / 512 / std::sqrt(kElements));
  }
}

// The same for what comes in: a first moment at rest that a small gradient pulls up.
TEST_P(MomentsInBf16, ASmallGradientIsNotLost) {
  constexpr int kSteps = 200, kElements = 4096;
  Moments x(kElements, 1, 1);
  for (float& g : x.grad) g = 1.02f;
  bf16 nearest(1.0f);
  double want = 1;
  for (x.step = 1; x.step <= kSteps; ++x.step) {
    AdamStep args = x.args();
    args.beta1 = 0.99;
    run(backend(), 1, adamw_step, args);
    nearest = bf16(0.99f * static_cast<float>(nearest) + 0.01f * 1.02f);
    want = 0.99 * want + 0.01 * 1.02;
  }
  double mean = 0;
  for (const bf16 m : x.m) mean += static_cast<double>(static_cast<float>(m)) / kElements;
  EXPECT_EQ(static_cast<float>(nearest), 1.0f);
  EXPECT_NEAR(mean, want, 4 * std::sqrt(kSteps) / 256 / std::sqrt(kElements));
}

// Tensors stepped one by one, and as one run that several threads cut elsewhere: the same bits.
TEST_P(MomentsInBf16, NeitherLayoutNorThreadsChangeABit) {
  constexpr int64_t kFirst = 70001, kSecond = 3, kThird = 40000, kAll = kFirst + kSecond + kThird;
  for (Op op : {adamw_step, lamb_step}) {
    const auto filled = [] {
      Moments x(kAll, 0.3f, 0.7f);
      const Rng rng(5, "gradient");
      for (size_t i = 0; i < x.grad.size(); ++i) x.grad[i] = static_cast<float>(rng.normal(i));
      x.step = 9;
      x.streams = {100, 101, 102};
      x.ends = {kFirst, kFirst + kSecond, kAll};
      return x;
    };
    Moments together = filled(), cut = filled(), apart = filled();
    run(backend(), 1, op, together.args());
    run(backend(), 3, op, cut.args());
    EXPECT_EQ(bits_of(together.m), bits_of(cut.m));
    EXPECT_EQ(bits_of(together.v), bits_of(cut.v));
    EXPECT_EQ(together.w, cut.w);
    int64_t begin = 0;
    for (size_t i = 0; i < 3; ++i) {
      AdamStep args = apart.args();
      const int64_t end = apart.ends[i], n = end - begin;
      for (View* view : {&args.w, &args.m, &args.v, &args.grad, &args.copy})
        *view = View(static_cast<char*>(view->data) + begin * dtype_bytes(view->dtype), {n}, view->dtype);
      args.rounding.keys = &apart.keys[i];
      args.rounding.ends = &n;
      args.rounding.count = 1;
      run(backend(), 2, op, args);
      begin = end;
    }
    EXPECT_EQ(bits_of(together.m), bits_of(apart.m));
    EXPECT_EQ(bits_of(together.v), bits_of(apart.v));
    // LAMB's ratio is over what is stepped at once.
    if (op == adamw_step) {
      EXPECT_EQ(together.w, apart.w);
    }
    Moments later = filled();
    later.step = 10;
    run(backend(), 1, op, later.args());
    EXPECT_NE(bits_of(together.m), bits_of(later.m));
  }
}

// What is stored is the f32 moment rounded with the draw of its element. Gradients and coefficients are powers of two,
// so that every backend computes the same f32.
TEST_P(MomentsInBf16, DrawsAreThoseOfTheFormula) {
  constexpr int64_t kN = 1003;
  for (Op op : {adamw_step, lamb_step}) {
    Moments x(kN);
    std::vector<float> want_w(static_cast<size_t>(kN));
    for (size_t i = 0; i < x.grad.size(); ++i) x.grad[i] = 1.0f + static_cast<float>(i) * 0x1p-14f;
    AdamStep args = x.args();
    args.beta1 = 0.5;
    args.beta2 = 0.5;
    args.weight_decay = 0;
    run(backend(), 2, op, args);
    const RoundingKey key = rounding_key(7, 11, 1);
    for (size_t i = 0; i < x.grad.size(); ++i) {
      const uint32_t random = rounding_bits(key, static_cast<uint32_t>(i));
      const float g = x.grad[i], v = static_cast<float>(0.5 * static_cast<double>(g) * g);
      ASSERT_EQ(x.m[i].bits, round_stochastic(0.5f * g, static_cast<uint16_t>(random)).bits) << i;
      ASSERT_EQ(x.v[i].bits, round_stochastic(v, static_cast<uint16_t>(random >> 16)).bits) << i;
      // The weight takes the moments as they were before AdamW rounded them.
      const double u = 0.5 * g / 0.5 / (std::sqrt(static_cast<double>(v) / 0.25) + 1e-8);
      if (op == adamw_step) {
        ASSERT_NEAR(x.w[i], 1 - 1e-3 * u, 1e-6 * u) << i;
      }
      ASSERT_EQ(x.copy[i].bits, bf16(x.w[i]).bits);
    }
  }
}

// bf16 moments are as good as they are read: half precision of the f32 step, not noise of its own.
TEST_P(MomentsInBf16, AStepIsNearTheOneInF32) {
  constexpr int64_t kN = 5000;
  Moments x(kN);
  std::vector<float> w = x.w, m(static_cast<size_t>(kN)), v(static_cast<size_t>(kN));
  std::vector<bf16> copy(static_cast<size_t>(kN));
  const Rng rng(5, "gradient");
  for (size_t i = 0; i < x.grad.size(); ++i) {
    x.grad[i] = static_cast<float>(rng.normal(i));
    x.m[i] = bf16(static_cast<float>(0.1 * rng.normal(i + kN)));
    x.v[i] = bf16(static_cast<float>(rng.uniform(i + 2 * kN) + 0.01));
    m[i] = static_cast<float>(x.m[i]);
    v[i] = static_cast<float>(x.v[i]);
  }
  for (Op op : {adamw_step, lamb_step}) {
    Moments narrow = x;
    std::vector<float> wide_w = w, wide_m = m, wide_v = v;
    AdamStep args = narrow.args();
    args.weight_decay = 0;  // which could cancel the rest, and leave rounding only
    AdamStep wide = args;
    wide.w.data = wide_w.data();
    wide.m = View(wide_m.data(), {kN}, DType::kF32);
    wide.v = View(wide_v.data(), {kN}, DType::kF32);
    wide.copy.data = copy.data();
    run(backend(), 2, op, args);
    run(backend(), 2, op, wide);
    for (size_t i = 0; i < w.size(); ++i) {
      ASSERT_NEAR(static_cast<float>(narrow.m[i]), wide_m[i], std::fabs(wide_m[i]) / 128) << i;
      ASSERT_NEAR(static_cast<float>(narrow.v[i]), wide_v[i], wide_v[i] / 128) << i;
      const double moved = std::fabs(wide_w[i] - w[i]);
      if (op == adamw_step) {
        ASSERT_EQ(narrow.w[i], wide_w[i]) << i;  // from the same registers
      }
      // A step of bf16 in m, half of one in the root of v; and the roundings of w.
      ASSERT_NEAR(narrow.w[i], wide_w[i], moved * (1.5 / 128 + 0.002) + 0x1p-22) << i;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Backends, MomentsInBf16, testing::ValuesIn(bf16_cases()), case_name);

TEST(MomentRoundingPieces, CutAtTensorsAndAtWords) {
  constexpr int64_t kWord = int64_t{1} << 32;
  const RoundingKey keys[] = {{1, 10}, {2, 20}, {3, 30}};
  const int64_t ends[] = {10, 10 + 2 * kWord + 5, 10 + 2 * kWord + 9};
  const MomentRounding r{.keys = keys, .ends = ends, .count = 3};
  struct Piece {
    int64_t begin, end;
    size_t tensor;
    uint32_t high, element;
  };
  const std::vector<Piece> want = {{4, 10, 0, 0, 4},
                                   {10, 10 + kWord, 1, 0, 0},
                                   {10 + kWord, 10 + 2 * kWord, 1, 1, 0},
                                   {10 + 2 * kWord, 10 + 2 * kWord + 5, 1, 2, 0},
                                   {10 + 2 * kWord + 5, 10 + 2 * kWord + 8, 2, 0, 0}};
  size_t i = 0;
  for_rounded_pieces(r, 4, 10 + 2 * kWord + 8, [&](int64_t begin, int64_t end, RoundingKey key, uint32_t element) {
    ASSERT_LT(i, want.size());
    const Piece& w = want[i++];
    EXPECT_EQ(begin, w.begin);
    EXPECT_EQ(end, w.end);
    EXPECT_EQ(element, w.element);
    const RoundingKey k = with_high_word(keys[w.tensor], w.high);
    EXPECT_TRUE(key.first == k.first && key.second == k.second) << i;
  });
  EXPECT_EQ(i, want.size());
  for_rounded_pieces(r, 10 + 3, 10 + 4, [&](int64_t begin, int64_t end, RoundingKey, uint32_t element) {
    EXPECT_TRUE(begin == 13 && end == 14 && element == 3);
    ++i;
  });
  EXPECT_EQ(i, want.size() + 1);
}

TEST(MomentRoundingChecks, Bf16MomentsNeedDrawsForEveryElement) {
  Moments x(8);
  x.ends = {7};
  EXPECT_THROW(run(find_backend("ref"), 1, adamw_step, x.args()), Bug);
  x.ends = {};
  EXPECT_THROW(run(find_backend("ref"), 1, adamw_step, x.args()), Bug);
}

}  // namespace
}  // namespace concerto::test
