// Counter-based random numbers (Philox 4x32-10, Salmon et al. 2011): a draw is a pure function of (seed, stream,
// counter), never of a stored state, so that recompute, resume and other layouts draw the same bits.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <string_view>

#include "concerto/base/hash.h"

namespace concerto {

constexpr std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> c, std::array<uint32_t, 2> k) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c[0], p1 = uint64_t{0xCD9E8D57u} * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(p0)};
    k[0] += 0x9E3779B9u;
    k[1] += 0xBB67AE85u;
  }
  return c;
}

// FNV-1a from a basis of its own (the usual one without its last digit). Every draw depends on it, and so does every
// recorded loss: it stays.
constexpr uint64_t hash_name(std::string_view name) { return fnv1a(name, 1469598103934665603u); }

// A named stream of draws, indexed by a 64-bit counter.
class Rng {
 public:
  constexpr Rng(uint64_t seed, uint64_t stream) : seed_(seed), stream_(stream) {}
  constexpr Rng(uint64_t seed, std::string_view name) : Rng(seed, hash_name(name)) {}

  constexpr std::array<uint32_t, 4> block(uint64_t i) const {
    return philox4x32({static_cast<uint32_t>(i), static_cast<uint32_t>(i >> 32), static_cast<uint32_t>(stream_),
                       static_cast<uint32_t>(stream_ >> 32)},
                      {static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32)});
  }
  constexpr uint64_t bits(uint64_t i) const {
    const auto b = block(i);
    return (uint64_t{b[1]} << 32) | b[0];
  }
  constexpr double uniform(uint64_t i) const { return static_cast<double>(bits(i) >> 11) * 0x1p-53; }  // [0, 1)
  // Uniform in [0, n); the bias of the multiply-shift is below n / 2^64.
  constexpr uint64_t below(uint64_t i, uint64_t n) const {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(bits(i)) * n) >> 64);
  }
  double normal(uint64_t i) const {  // Box-Muller, one of the two
    const auto b = block(i);
    const double u = (static_cast<double>((uint64_t{b[1]} << 32 | b[0]) >> 11) + 0.5) * 0x1p-53;
    const double v = static_cast<double>((uint64_t{b[3]} << 32 | b[2]) >> 11) * 0x1p-53;
    return std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586 * v);
  }

 private:
  uint64_t seed_, stream_;
};

}  // namespace concerto
