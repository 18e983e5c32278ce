// For tests: pauses that permute what comes first.
#pragma once

#include <chrono>
#include <cstdint>
#include <thread>

#include "concerto/base/rng.h"

namespace concerto {

class RandomDelays {
 public:
  RandomDelays(uint64_t seed, int rank, double most_seconds)  // seed 0: none
      : seed_(seed), rank_(static_cast<uint64_t>(rank)), most_seconds_(most_seconds) {}
  void sleep() {
    if (seed_ == 0) return;
    std::this_thread::sleep_for(std::chrono::duration<double>(Rng(seed_, rank_).uniform(drawn_++) * most_seconds_));
  }

 private:
  uint64_t seed_, rank_, drawn_ = 0;
  double most_seconds_;
};

}  // namespace concerto
