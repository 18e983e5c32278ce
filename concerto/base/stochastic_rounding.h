// Stochastic rounding of f32 to bf16: up or down at random, with odds that make the mean exact, so that a change below
// half a step of bf16 is kept on average where rounding to nearest would lose it every time. The random bits are a
// function of (seed, tensor, step, element) and of nothing else: no layout and no number of threads changes them.
#pragma once

#include <bit>
#include <cstdint>

#include "concerto/base/dtype.h"
#include "concerto/base/rng.h"

namespace concerto {

// What the draws of one tensor at one step start from.
struct RoundingKey {
  uint32_t first = 0, second = 0;
};
// `stream` is the tensor's.
constexpr RoundingKey rounding_key(uint64_t seed, uint64_t stream, uint64_t step) {
  const auto block = Rng(seed, stream).block(step);
  return {block[0], block[1]};
}
// Elements from 2^32 on have keys of their own: `high` is the element's upper word.
constexpr RoundingKey with_high_word(RoundingKey key, uint32_t high) {
  return {key.first, key.second ^ high * 0x9e3779b9u};
}
// 32 random bits of an element (its lower word), enough to round two numbers: lowbias32 (Wellons 2018), a bijection with
// full avalanche, with a key at its beginning and one in its midst. Cheap enough to be made for every element.
constexpr uint32_t rounding_bits(RoundingKey key, uint32_t element) {
  uint32_t x = element ^ key.first;
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15 ^ key.second;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

// Up (away from zero) with odds (the part cut off) / (a step of bf16), if `random` is uniform. What bf16 holds stays;
// NaN stays NaN.
inline bf16 round_stochastic(float value, uint16_t random) {
  const uint32_t u = std::bit_cast<uint32_t>(value);
  if (value != value) return bf16(value);
  bf16 rounded;
  rounded.bits = static_cast<uint16_t>((u + random) >> 16);
  return rounded;
}

}  // namespace concerto
