// What the data room hands to training: one micro-batch of tokens without padding. Rows of a batch lie one after the
// other; a token knows its position in its document. Padding never becomes a token, so it can reach no count, no loss
// and no router.
#pragma once

#include <cstdint>
#include <vector>

namespace concerto {

constexpr int32_t kIgnoreIndex = -100;

struct MicroBatch {
  std::vector<int32_t> token_ids;    // [T]
  std::vector<int32_t> positions;    // [T] from 0 in each document (or in each row when documents are not masked)
  std::vector<int32_t> targets;      // [T] the next token, or kIgnoreIndex
  std::vector<int32_t> doc_offsets;  // [D + 1] token ranges inside which attention is causal; covers [0, T)
  std::vector<int32_t> row_offsets;  // [B + 1] token ranges of the rows (sequences); covers [0, T)
  // Multi-token prediction, depth m at [m * T, (m + 1) * T): the token at t + 1 + m and its target at t + 2 + m. Beyond
  // the end of a document: token = the pad id (or 0), target = kIgnoreIndex.
  std::vector<int32_t> mtp_token_ids;  // [depth * T]
  std::vector<int32_t> mtp_targets;    // [depth * T]

  int64_t tokens() const { return static_cast<int64_t>(token_ids.size()); }
  int64_t rows() const { return row_offsets.empty() ? 0 : static_cast<int64_t>(row_offsets.size()) - 1; }
  int64_t valid_targets() const {
    int64_t n = 0;
    for (int32_t t : targets) n += t != kIgnoreIndex;
    return n;
  }
};

}  // namespace concerto
