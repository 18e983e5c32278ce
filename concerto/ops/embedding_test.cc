#include "concerto/ops/embedding.h"

#include "concerto/ops/op_test.h"

namespace concerto::test {
namespace {

constexpr int64_t kVocab = 11;

Body forward_body(int64_t hidden, const Values& ids, const Values& table) {
  return [=](OpRun& r) {
    const int64_t tokens = static_cast<int64_t>(ids.size());
    embedding_forward(r.context(), {.ids = r.in(Kind::kI32, {tokens}, ids),
                                    .table = r.in(Kind::kCompute, {kVocab, hidden}, table),
                                    .y = r.out("y", Kind::kCompute, {tokens, hidden}, {}, 3)});
  };
}

// The same from the weights that training keeps: y is of the compute type, the table of the stat type.
Body rounding_body(int64_t hidden, const Values& ids, const Values& table) {
  return [=](OpRun& r) {
    const int64_t tokens = static_cast<int64_t>(ids.size());
    embedding_forward(r.context(), {.ids = r.in(Kind::kI32, {tokens}, ids),
                                    .table = r.in(Kind::kStat, {kVocab, hidden}, table, 1),
                                    .y = r.out("y", Kind::kCompute, {tokens, hidden}, {}, 3)});
  };
}

Body backward_body(int64_t hidden, const Values& ids, const Values& dy, int64_t skip_id, const Values& start) {
  return [=](OpRun& r) {
    const int64_t tokens = static_cast<int64_t>(ids.size());
    const Bound bound{.length = tokens + 1, .norm = static_cast<double>(tokens) * largest(dy) + largest(start)};
    embedding_backward_weight(r.context(), {.ids = r.in(Kind::kI32, {tokens}, ids),
                                            .dy = r.in(Kind::kCompute, {tokens, hidden}, dy, 2),
                                            .skip_id = skip_id,
                                            .dtable = r.inout("dtable", Kind::kStat, {kVocab, hidden}, start, bound)});
  };
}

class Embedding : public OpTest {};

TEST_P(Embedding, ForwardAndBackward) {
  for (const int64_t hidden : {1, 33, 64})
    for (const Values& ids : {integers({}), integers({0, 10, 3, 3, 0, 3, 7, 10, 10, 3, 1}), Values(200, 4.0)})
      for (const int64_t skip : {-1, 3}) {
        SCOPED_TRACE(fmt::format("hidden {}, {} tokens, skip {}", hidden, ids.size(), skip));
        const int64_t n = static_cast<int64_t>(ids.size()) * hidden;
        check_op(GetParam(), forward_body(hidden, ids, normal("table", kVocab * hidden)));
        check_op(GetParam(), rounding_body(hidden, ids, normal("table", kVocab * hidden)));
        check_op(GetParam(), backward_body(hidden, ids, normal("dy", n), skip, normal("dtable", kVocab * hidden)),
                 true);
      }
}

TEST_P(Embedding, RowsOfTheStatTypeAreRounded) {
  const Values table = normal("table", kVocab * 40), ids = integers({4, 0, 10, 4});
  const auto from_stat = run_op(backend(), type(), type(), 2, rounding_body(40, ids, table)).at("y").values;
  const auto from_compute =
      run_op(backend(), type(), type(), 2, forward_body(40, ids, rounded(table, type()))).at("y").values;
  EXPECT_EQ(from_stat, from_compute);
}

// Token order is part of the contract: in f32, 2^24 + 1 - 2^24 depends on it.
TEST_P(Embedding, SumsInTokenOrder) {
  if (type() == DType::kF64) return;
  const auto sum = [&](const Values& dy) {
    return run_op(backend(), type(), type(), 3, backward_body(1, integers({5, 5, 5}), dy, -1, Values(kVocab)))
        .at("dtable")
        .values[5];
  };
  EXPECT_EQ(sum({0x1p24, 1, -0x1p24}), 0);
  EXPECT_EQ(sum({0x1p24, -0x1p24, 1}), 1);
}

// Slices of a table: their look-ups add up to the whole look-up, their gradients are the whole's rows, in every bit.
TEST_P(Embedding, Slices) {
  const int64_t hidden = 35;
  const Values ids = integers({0, 10, 3, 3, 0, 4, 7, 10, 10, 3, 1}), table = normal("table", kVocab * hidden);
  const int64_t tokens = static_cast<int64_t>(ids.size());
  const Values dy = normal("dy", tokens * hidden), start = normal("dtable", kVocab * hidden);
  const auto forward = [&](int64_t begin, int64_t count, Kind kind) {
    return [=](OpRun& r) {
      embedding_forward(r.context(),
                        {.ids = r.in(Kind::kI32, {tokens}, ids),
                         .table = r.in(kind, {count, hidden}, slice(table, begin * hidden, count * hidden)),
                         .y = r.out("y", Kind::kCompute, {tokens, hidden}),
                         .begin = begin,
                         .slice = true});
    };
  };
  const auto backward = [&](int64_t begin, int64_t count) {
    return [=](OpRun& r) {
      embedding_backward_weight(
          r.context(), {.ids = r.in(Kind::kI32, {tokens}, ids),
                        .dy = r.in(Kind::kCompute, {tokens, hidden}, dy),
                        .skip_id = 7,
                        .dtable = r.inout("dtable", Kind::kStat, {count, hidden},
                                          slice(start, begin * hidden, count * hidden), {.length = 5, .norm = 20}),
                        .begin = begin,
                        .slice = true});
    };
  };
  for (const Kind kind : {Kind::kCompute, Kind::kStat}) {
    const Values whole = run_op(backend(), type(), type(), 2, forward(0, kVocab, kind)).at("y").values;
    Values sum(whole.size());
    for (const auto& [begin, count] : {std::pair<int64_t, int64_t>{0, 4}, {4, 0}, {4, 5}, {9, 2}}) {
      check_op(GetParam(), forward(begin, count, kind), true);
      const Values part = run_op(backend(), type(), type(), 2, forward(begin, count, kind)).at("y").values;
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
    }
    EXPECT_EQ(sum, whole);
  }
  const Values whole =
      run_op(backend(), type(), type(), 2, backward_body(hidden, ids, dy, 7, start)).at("dtable").values;
  for (const auto& [begin, count] : {std::pair<int64_t, int64_t>{0, 4}, {4, 5}, {9, 2}}) {
    check_op(GetParam(), backward(begin, count), true);
    EXPECT_TRUE(same_bits(run_op(backend(), type(), type(), 2, backward(begin, count)).at("dtable").values,
                          slice(whole, begin * hidden, count * hidden)))
        << begin;
  }
}

TEST_P(Embedding, SkippedRowKeepsItsGradient) {
  const Values start = rounded(normal("dtable", kVocab * 2), stat());
  const Values got = run_op(backend(), type(), type(), 2, backward_body(2, integers({3, 4}), {1, 1, 1, 1}, 3, start))
                         .at("dtable")
                         .values;
  EXPECT_TRUE(same_bits(slice(got, 6, 2), slice(start, 6, 2)));
  EXPECT_NE(got[8], start[8]);
}
CONCERTO_ON_EVERY_BACKEND(Embedding);

TEST(EmbeddingGradient, FiniteDifferences) {
  const Values ids = integers({2, 9, 2, 0}), table = normal("table", kVocab * 3), dy = normal("dy", 4 * 3);
  const Values start = normal("dtable", kVocab * 3);
  check_gradient("dtable", table, minus(output_f64(backward_body(3, ids, dy, -1, start), "dtable"), start),
                 [&](const Values& v) { return dot(dy, output_f64(forward_body(3, ids, v), "y")); });
}

TEST(EmbeddingChecks, RefRefusesIdsOutsideTheTable) {
  EXPECT_THROW(run_f64(forward_body(1, integers({11}), Values(kVocab))), Bug);
  EXPECT_THROW(run_f64(forward_body(1, integers({-1}), Values(kVocab))), Bug);
}

}  // namespace
}  // namespace concerto::test
