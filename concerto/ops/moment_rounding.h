// How moments in bf16 are rounded as they are stored (base/stochastic_rounding.h).
#pragma once

#include <algorithm>
#include <cstdint>

#include "concerto/base/stochastic_rounding.h"

namespace concerto {

// A run of tensors that lie without a gap, each with draws of its own: the same ones whatever lies beside it.
struct MomentRounding {
  const RoundingKey* keys = nullptr;  // [count] of the tensors, at this step
  const int64_t* ends = nullptr;      // [count] rising: where in the run each tensor ends
  int64_t count = 0;
};

// f(begin, end, key, element) for the pieces of [begin, end) that share a key; `element` is the lower word of the
// first's place in its tensor, and does not overflow within the piece.
template <class F>
void for_rounded_pieces(const MomentRounding& r, int64_t begin, int64_t end, F&& f) {
  constexpr int64_t kWord = int64_t{1} << 32;
  int64_t tensor = std::upper_bound(r.ends, r.ends + r.count, begin) - r.ends;
  while (begin < end) {
    const int64_t first = tensor > 0 ? r.ends[tensor - 1] : 0, high = (begin - first) / kWord;
    const int64_t stop = std::min({end, r.ends[tensor], first + (high + 1) * kWord});
    if (begin < stop)
      f(begin, stop, with_high_word(r.keys[tensor], static_cast<uint32_t>(high)), static_cast<uint32_t>(begin - first));
    begin = stop;
    if (begin == r.ends[tensor]) ++tensor;
  }
}

}  // namespace concerto
