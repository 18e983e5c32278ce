// Chooses the next token from logits: greedy at temperature 0, else softmax(logits / temperature) cut to the smallest
// set of tokens whose probability reaches top_p. The draw is a function of (seed, position), so a sample can be
// repeated.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "concerto/tensor/view.h"

namespace concerto {

struct SamplerOptions {
  double temperature = 0.8;
  double top_p = 0.95;
  uint64_t seed = 0;
};

class Sampler {
 public:
  explicit Sampler(const SamplerOptions& options) : options_(options) {}
  int32_t choose(View logits, int64_t position);  // [vocab] f32 or f64; Error(kNumeric) where they are not finite

 private:
  SamplerOptions options_;
  std::vector<std::pair<float, int32_t>> candidates_;
};

}  // namespace concerto
