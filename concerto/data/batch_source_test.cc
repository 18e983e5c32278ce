#include "concerto/data/batch_source.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <set>

#include "concerto/base/allocation_guard.h"
#include "concerto/base/rng.h"
#include "concerto/data/test_data.h"

namespace concerto {
namespace {

constexpr int32_t kEos = 2;

// Documents of 1 to `longest` tokens, the last of them eos. Ids are unique: first_id, first_id + 1, ...
Documents unique_documents(uint64_t seed, int64_t count, int64_t longest, int32_t first_id = 10) {
  const Rng rng(seed, "documents");
  Documents documents;
  for (int64_t d = 0; d < count; ++d) {
    auto& document = documents.emplace_back();
    for (uint64_t t = 0; t < rng.below(d, longest); ++t) document.push_back(first_id++);
    document.push_back(kEos);
  }
  return documents;
}

int64_t total_tokens(const Documents& documents) {
  int64_t total = 0;
  for (const auto& document : documents) total += static_cast<int64_t>(document.size());
  return total;
}

BatchSourceOptions options_for(std::vector<DataSource> sources, int64_t seq_length) {
  return {.sources = std::move(sources), .vocab_size = 60000, .seq_length = seq_length, .pad_id = 0, .seed = 7};
}

void check_form(const MicroBatch& batch, const BatchSourceOptions& options) {
  const auto tokens = static_cast<int32_t>(batch.tokens());
  EXPECT_EQ(batch.positions.size(), batch.token_ids.size());
  EXPECT_EQ(batch.targets.size(), batch.token_ids.size());
  EXPECT_EQ(batch.mtp_token_ids.size(), batch.token_ids.size() * options.mtp_depth);
  EXPECT_EQ(batch.mtp_targets.size(), batch.token_ids.size() * options.mtp_depth);
  for (const auto* offsets : {&batch.doc_offsets, &batch.row_offsets}) {
    EXPECT_EQ(offsets->front(), 0);
    EXPECT_EQ(offsets->back(), tokens);
    for (size_t i = 1; i < offsets->size(); ++i) EXPECT_LT((*offsets)[i - 1], (*offsets)[i]);
  }
  for (size_t i = 1; i < batch.row_offsets.size(); ++i) {
    EXPECT_LE(batch.row_offsets[i] - batch.row_offsets[i - 1], options.seq_length);
    EXPECT_TRUE(std::binary_search(batch.doc_offsets.begin(), batch.doc_offsets.end(), batch.row_offsets[i]));
  }
  for (size_t d = 1; d < batch.doc_offsets.size(); ++d)
    for (int32_t t = batch.doc_offsets[d - 1]; t < batch.doc_offsets[d]; ++t)
      EXPECT_EQ(batch.positions[t], t - batch.doc_offsets[d - 1]);
}

std::vector<int32_t> tokens_of(const std::vector<MicroBatch>& batches) {
  std::vector<int32_t> all;
  for (const auto& batch : batches) all.insert(all.end(), batch.token_ids.begin(), batch.token_ids.end());
  return all;
}

bool same(const MicroBatch& a, const MicroBatch& b) {
  return a.token_ids == b.token_ids && a.positions == b.positions && a.targets == b.targets &&
         a.doc_offsets == b.doc_offsets && a.row_offsets == b.row_offsets && a.mtp_token_ids == b.mtp_token_ids &&
         a.mtp_targets == b.mtp_targets;
}

// Any seed, length and shape: after the first e epochs' tokens of the stream every token was seen exactly e times.
TEST(BatchSource, LosesAndRepeatsNothingInAnEpoch) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    const TestFolder folder;
    const Documents documents = unique_documents(seed, 5 + seed * 7, 3 + seed * 5);
    write_documents(folder / "a", documents, 60000);
    auto options = options_for({{folder / "a", 1}}, 4 + static_cast<int64_t>(seed) * 3);
    options.seed = seed;
    BatchSource source(options);
    const int64_t total = total_tokens(documents), epochs = 3;
    std::vector<MicroBatch> out;
    source.fill(0, (total * epochs + options.seq_length - 1) / options.seq_length, 4, out);
    for (const auto& batch : out) check_form(batch, options);
    const auto stream = tokens_of(out);
    std::set<std::vector<int32_t>> orders;
    for (int64_t e = 0; e < epochs; ++e) {
      std::map<int32_t, int64_t> counts;
      for (int64_t t = e * total; t < (e + 1) * total; ++t) ++counts[stream[t]];
      EXPECT_EQ(counts[kEos], static_cast<int64_t>(documents.size()));
      for (const auto& document : documents)
        for (const int32_t id : document) EXPECT_TRUE(id == kEos || counts[id] == 1) << id;
      orders.emplace(stream.begin() + e * total, stream.begin() + (e + 1) * total);
    }
    EXPECT_EQ(orders.size(), 3u) << "each epoch has an order of its own";
  }
}

TEST(BatchSource, TargetsAreTheNextTokenOfTheSameDocument) {
  const TestFolder folder;
  const Documents documents = unique_documents(3, 40, 30);
  write_documents(folder / "a", documents, 60000);
  std::map<int32_t, int32_t> next;
  for (const auto& document : documents)
    for (size_t t = 0; t + 1 < document.size(); ++t) next[document[t]] = document[t + 1];
  auto options = options_for({{folder / "a", 1}}, 16);
  options.mtp_depth = 2;
  BatchSource source(options);
  std::vector<MicroBatch> out;
  source.fill(5, 60, 3, out);
  int64_t ends = 0, cut = 0;
  for (const auto& batch : out) {
    check_form(batch, options);
    const int64_t tokens = batch.tokens();
    for (int64_t t = 0; t < tokens; ++t) {
      const int32_t id = batch.token_ids[t];
      // What follows id by 1, 2, 3 tokens in its document, or nothing.
      int32_t ahead[4] = {id, kIgnoreIndex, kIgnoreIndex, kIgnoreIndex};
      for (int k = 1; k < 4 && ahead[k - 1] != kEos && ahead[k - 1] != kIgnoreIndex; ++k)
        ahead[k] = next.at(ahead[k - 1]);
      EXPECT_EQ(batch.targets[t], ahead[1]);
      for (int m = 0; m < 2; ++m) {
        EXPECT_EQ(batch.mtp_token_ids[m * tokens + t], ahead[m + 1] == kIgnoreIndex ? options.pad_id : ahead[m + 1]);
        EXPECT_EQ(batch.mtp_targets[m * tokens + t], ahead[m + 2 > 3 ? 3 : m + 2]);
      }
      ends += id == kEos;
    }
    for (size_t r = 1; r < batch.row_offsets.size(); ++r) cut += batch.token_ids[batch.row_offsets[r] - 1] != kEos;
  }
  EXPECT_GT(ends, 10);
  EXPECT_GT(cut, 10);  // rows that end inside a document still know their last target
}

TEST(BatchSource, WithoutDocumentMaskRowsAreOneTextAndTargetsCrossBorders) {
  const TestFolder folder;
  write_documents(folder / "a", {{10, 11, kEos}, {20, kEos}}, 60000);
  auto options = options_for({{folder / "a", 1}}, 4);
  options.document_mask = false;
  options.shuffle = false;
  options.mtp_depth = 1;
  BatchSource source(options);
  std::vector<MicroBatch> out;
  source.fill(0, 2, 2, out);
  EXPECT_EQ(out[0].token_ids, (std::vector<int32_t>{10, 11, kEos, 20, kEos, 10, 11, kEos}));
  EXPECT_EQ(out[0].targets, (std::vector<int32_t>{11, kEos, 20, kEos, 10, 11, kEos, 20}));
  EXPECT_EQ(out[0].mtp_targets, (std::vector<int32_t>{kEos, 20, kEos, 10, 11, kEos, 20, kEos}));
  EXPECT_EQ(out[0].positions, (std::vector<int32_t>{0, 1, 2, 3, 0, 1, 2, 3}));
  EXPECT_EQ(out[0].doc_offsets, (std::vector<int32_t>{0, 4, 8}));
}

TEST(BatchSource, ADocumentCutByARowStartsAnewInTheNext) {
  const TestFolder folder;
  write_documents(folder / "a", {{10, 11, 12, 13, 14, kEos}}, 60000);
  BatchSource source(options_for({{folder / "a", 1}}, 4));
  std::vector<MicroBatch> out;
  source.fill(0, 2, 1, out);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[0].targets, (std::vector<int32_t>{11, 12, 13, 14}));
  EXPECT_EQ(out[1].token_ids, (std::vector<int32_t>{14, kEos, 10, 11}));
  EXPECT_EQ(out[1].positions, (std::vector<int32_t>{0, 1, 0, 1}));
  EXPECT_EQ(out[1].targets, (std::vector<int32_t>{kEos, kIgnoreIndex, 11, 12}));
  EXPECT_EQ(out[1].doc_offsets, (std::vector<int32_t>{0, 2, 4}));
}

// A run that stops and goes on sees what one that never stopped sees.
TEST(BatchSource, AnySampleIsAFunctionOfItsNumber) {
  const TestFolder folder;
  write_documents(folder / "a", unique_documents(1, 30, 20), 60000);
  write_documents(folder / "b", unique_documents(2, 20, 9, 5000), 60000);
  const Documents records = unique_documents(3, 25, 12, 9000);
  std::vector<std::vector<uint8_t>> masks;
  for (const auto& record : records) masks.emplace_back(record.size(), 1);
  write_documents(folder / "c", records, 60000, masks);
  auto options = options_for({{folder / "a", 0.5}, {folder / "b", 0.2}, {folder / "c", 0.3}}, 16);
  options.mtp_depth = 1;
  BatchSource straight(options);
  std::vector<MicroBatch> all, some;
  for (int64_t step = 0; step < 40; ++step) {
    straight.fill(step * 6, 6, 4, all);
    EXPECT_EQ(all.size(), 2u);
    EXPECT_EQ(all[0].rows(), 4);
    EXPECT_EQ(all[1].rows(), 2);
    if (step % 7 != 3) continue;
    BatchSource resumed(options);
    resumed.fill(step * 6, 6, 4, some);
    ASSERT_EQ(some.size(), all.size());
    for (size_t m = 0; m < all.size(); ++m) EXPECT_TRUE(same(some[m], all[m])) << "step " << step;
  }
  options.seed = 8;
  BatchSource other(options);
  other.fill(39 * 6, 6, 4, some);
  EXPECT_FALSE(same(some[0], all[0]));
}

TEST(BatchSource, WeightsAreKeptInEveryWindow) {
  const TestFolder folder;
  const std::vector<double> weights = {0.7, 0.05, 0.25};
  std::vector<DataSource> sources;
  for (int s = 0; s < 3; ++s) {
    write_documents(folder / std::to_string(s), {std::vector<int32_t>(7, 100 + s)}, 60000);
    sources.push_back({folder / std::to_string(s), weights[s] * 3});  // weights need not sum to one
  }
  BatchSource source(options_for(sources, 4));
  std::vector<MicroBatch> out;
  source.fill(0, 2000, 1, out);
  for (int s = 0; s < 3; ++s) {
    std::vector<double> seen(1, 0);
    for (const auto& batch : out) seen.push_back(seen.back() + (batch.token_ids[0] == 100 + s));
    for (int64_t begin = 0; begin < 2000; begin += 13)
      for (int64_t end = begin + 1; end <= 2000; end += 97)
        EXPECT_NEAR(seen[end] - seen[begin], weights[s] * static_cast<double>(end - begin), 3.0);
    EXPECT_NEAR(seen[2000], weights[s] * 2000, 1.0);
  }
}

TEST(BatchSource, RecordsAreKeptWholeAndPacked) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const TestFolder folder;
    const Documents records = unique_documents(seed, 700, 20);
    std::vector<std::vector<uint8_t>> masks;
    for (const auto& record : records) {
      masks.emplace_back(record.size(), 1);
      for (size_t t = 0; t < record.size() / 2; ++t) masks.back()[t] = 0;
    }
    write_documents(folder / "a", records, 60000, masks);
    auto options = options_for({{folder / "a", 1}}, 15);
    options.seed = seed;
    BatchSource source(options);
    std::map<int32_t, std::pair<const std::vector<int32_t>*, const std::vector<uint8_t>*>> by_first;
    int64_t too_long = 0, tokens = 0, only_eos = 0;
    for (size_t d = 0; d < records.size(); ++d) {
      if (records[d].size() > 15) {
        ++too_long;
        continue;
      }
      tokens += static_cast<int64_t>(records[d].size());
      only_eos += records[d].size() == 1;
      if (records[d].size() > 1) by_first[records[d][0]] = {&records[d], &masks[d]};
    }
    EXPECT_EQ(source.sources()[0].dropped_documents, too_long);
    EXPECT_GT(too_long, 0);
    const int64_t rows = source.rows_per_pass();
    EXPECT_LT(rows * 15, tokens * 1.3);  // little room is wasted
    for (int64_t epoch = 0; epoch < 2; ++epoch) {
      std::vector<MicroBatch> out;
      source.fill(epoch * rows, rows, 8, out);
      std::set<int32_t> seen;
      int64_t seen_eos = 0;
      for (const auto& batch : out) {
        check_form(batch, options);
        for (size_t d = 1; d < batch.doc_offsets.size(); ++d) {
          const int32_t begin = batch.doc_offsets[d - 1], end = batch.doc_offsets[d];
          if (end - begin == 1) {
            ++seen_eos;
            continue;
          }
          ASSERT_TRUE(by_first.contains(batch.token_ids[begin]));
          const auto& [record, mask] = by_first[batch.token_ids[begin]];
          EXPECT_TRUE(seen.insert(batch.token_ids[begin]).second);
          ASSERT_EQ(static_cast<size_t>(end - begin), record->size());
          for (int32_t t = begin; t < end; ++t) {
            EXPECT_EQ(batch.token_ids[t], (*record)[t - begin]);
            const bool trained = t + 1 < end && (*mask)[t + 1 - begin];
            EXPECT_EQ(batch.targets[t], trained ? batch.token_ids[t + 1] : kIgnoreIndex);
          }
        }
      }
      EXPECT_EQ(seen.size(), by_first.size());
      EXPECT_EQ(seen_eos, only_eos);
    }
  }
}

TEST(BatchSource, OnePassSeesEachSourceOnceInOrder) {
  const TestFolder folder;
  write_documents(folder / "a", {{10, 11, 12, 13, kEos}}, 60000);
  write_documents(folder / "b", {{20, 21, kEos}, {22, kEos}, {23, 24, 25, kEos}}, 60000);
  auto options = options_for({{folder / "a", 0}, {folder / "b", 5}}, 4);
  options.one_pass = true;
  BatchSource source(options);
  EXPECT_EQ(source.rows_per_pass(), 5);
  std::vector<MicroBatch> out;
  source.fill(0, 5, 2, out);
  EXPECT_EQ(tokens_of(out), (std::vector<int32_t>{10, 11, 12, 13, kEos, 20, 21, kEos, 22, kEos, 23, 24, 25, kEos}));
  EXPECT_EQ(out[0].row_offsets, (std::vector<int32_t>{0, 4, 5}));
  EXPECT_EQ(out[2].token_ids, (std::vector<int32_t>{kEos}));  // nothing follows the last token of a pass
  EXPECT_EQ(out[2].targets, (std::vector<int32_t>{kIgnoreIndex}));
}

// Text and records, over several epochs of each.
TEST(BatchSource, SteadyFillsDoNotAllocate) {
  const TestFolder folder;
  const Documents text = unique_documents(1, 60, 20), records = unique_documents(2, 40, 12);
  std::vector<std::vector<uint8_t>> masks;
  for (const auto& record : records) masks.emplace_back(record.size(), 1);
  write_documents(folder / "text", text, 60000);
  write_documents(folder / "records", records, 60000, masks);
  auto options = options_for({{folder / "text", 1}, {folder / "records", 1}}, 16);
  options.mtp_depth = 2;
  BatchSource source(options);
  std::vector<MicroBatch> out;
  source.fill(0, 8, 4, out);
  AllocationGuard::reset();
  {
    const AllocationGuard guard;
    for (int64_t step = 1; step < 100; ++step) source.fill(step * 8, 8, 4, out);
  }
  EXPECT_EQ(AllocationGuard::count(), 0) << AllocationGuard::first_stack();
  for (const SourceInfo& s : source.sources()) EXPECT_LT(3 * s.rows, 400) << "no change of epoch";
}

TEST(BatchSource, NamesWhatIsWrong) {
  const TestFolder folder;
  write_documents(folder / "empty", {{}, {}}, 60000);
  write_documents(folder / "a", {{10, 59999}}, 60000);
  write_documents(folder / "long", {{1, 2, 3, 4, 5}}, 60000, {{1, 1, 1, 1, 1}});
  const auto build = [&](std::vector<DataSource> sources, int64_t vocab_size = 60000) {
    auto options = options_for(std::move(sources), 4);
    options.vocab_size = vocab_size;
    BatchSource source(options);
  };
  expect_error(ErrorCode::kConfig, {"no source"}, [&] { build({}); });
  expect_error(ErrorCode::kConfig, {"weight", "0"}, [&] { build({{folder / "a", 0}}); });
  expect_error(ErrorCode::kConfig, {"weight", "-1"}, [&] { build({{folder / "a", -1}}); });
  expect_error(ErrorCode::kIo, {"missing"}, [&] { build({{folder / "missing", 1}}); });
  expect_error(ErrorCode::kData, {"empty", "no tokens"}, [&] { build({{folder / "empty", 1}}); });
  expect_error(ErrorCode::kData, {"a.bin", "document 0", "vocabulary"}, [&] { build({{folder / "a", 1}}, 59999); });
  expect_error(ErrorCode::kData, {"long", "seq_length"}, [&] { build({{folder / "long", 1}}); });
  write_documents(folder / "masked", {{1, 2}, {3}}, 10, {{0, 0}, {0}});
  expect_error(ErrorCode::kData, {"masked.lsm", "zero everywhere"}, [&] { build({{folder / "masked", 1}}); });
  folder.write("masked.lsm", "\1\1\2");
  expect_error(ErrorCode::kData, {"masked.lsm", "document 1, token 0", "the mask is 2"}, [&] {
    build({{folder / "masked", 1}});
  });
}

// As in a file that is too large to be read whole at the start.
TEST(BatchSource, AMaskThatIsDamagedIsFoundWhenItIsRead) {
  const TestFolder folder;
  write_documents(folder / "a", {{1, 2}, {3}}, 10, {{1, 1}, {1}});
  auto options = options_for({{folder / "a", 1}}, 4);
  BatchSource source(options);
  std::vector<MicroBatch> out;
  source.fill(0, 1, 1, out);
  {
    std::fstream file(folder / "a.lsm", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(2);
    file.put('\xff');
  }
  expect_error(ErrorCode::kData, {"a.lsm", "document 1, token 0", "the mask is 255"},
               [&] { source.fill(1, 1, 1, out); });
}

}  // namespace
}  // namespace concerto
