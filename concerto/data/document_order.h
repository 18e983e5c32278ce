// The order in which an epoch sees n things: a permutation that is a pure function of (seed, name, epoch).
#pragma once

#include <cstdint>
#include <numeric>
#include <string_view>
#include <utility>
#include <vector>

#include "concerto/base/rng.h"

namespace concerto {

// Fisher-Yates on order, which is resized to n; the file order when not shuffled.
inline void document_order(uint64_t seed, uint64_t source, int64_t epoch, bool shuffle, int64_t n,
                           std::vector<uint32_t>& order) {
  order.resize(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0u);
  if (!shuffle) return;
  const Rng rng(seed, hash_name("data.order") ^ source << 40 ^ static_cast<uint64_t>(epoch));
  for (int64_t i = n - 1; i > 0; --i)
    std::swap(order[i], order[rng.below(static_cast<uint64_t>(i), static_cast<uint64_t>(i) + 1)]);
}

}  // namespace concerto
