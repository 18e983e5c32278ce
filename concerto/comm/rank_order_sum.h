// The one way sums over ranks are made, so that their bits are the same on every transport: element by element, rank 0
// first, in the type of the parts; bf16 in f32, rounded once when the sum is stored. Works block by block, so that the
// result may take the place of a part.
#pragma once

#include "concerto/comm/operation.h"

namespace concerto {

class RankOrderSum {
 public:
  static constexpr int64_t kBlock = 1024;  // elements

  // Adds part[0 .. count), count <= kBlock; the first part begins the sum. `round`: f32 goes through bf16 before.
  void add(const Piece& part, bool first, bool round);
  // The sum, to memory of the parts' type, or f32 where the parts are bf16.
  void store(const Piece& out) const;

 private:
  alignas(64) union {
    float f32[kBlock];
    double f64[kBlock];
    uint32_t u32[kBlock];
    uint64_t u64[kBlock];
  } sum_;
};

// out = the sum over r in [0, ranks) of part(r), all of `out`'s number of elements; every one of `outs` gets it.
template <class PartOf, class OutOf>
void sum_in_rank_order(int64_t elements, int ranks, bool round, PartOf&& part, int outs, OutOf&& out) {
  RankOrderSum sum;
  for (int64_t begin = 0; begin < elements; begin += RankOrderSum::kBlock) {
    const int64_t count = elements - begin < RankOrderSum::kBlock ? elements - begin : RankOrderSum::kBlock;
    for (int r = 0; r < ranks; ++r) sum.add(part(r).range(begin, count), r == 0, round);
    for (int o = 0; o < outs; ++o) sum.store(out(o).range(begin, count));
  }
}

}  // namespace concerto
