// XXH64 (Yann Collet's xxHash, seed 0): finds damage in files at memory speed. It is no defence against an enemy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace concerto {

// Streaming: update() in any pieces gives the digest of their concatenation.
class Hash64 {
 public:
  void update(const void* data, size_t bytes);
  uint64_t digest() const;

 private:
  void block(const unsigned char* p);
  uint64_t lanes_[4] = {0x60EA27EEADC0B5D6u, 0xC2B2AE3D27D4EB4Fu, 0, 0x61C8864E7A143579u};
  unsigned char pending_[32] = {};
  size_t pending_bytes_ = 0;
  uint64_t total_ = 0;
};

uint64_t hash64(const void* data, size_t bytes);
inline uint64_t hash64(std::string_view text) { return hash64(text.data(), text.size()); }

// FNV-1a of 64 bits, for short names. `basis` is kFnvBasis, or the hash of what comes before.
constexpr uint64_t kFnvBasis = 14695981039346656037u;
constexpr uint64_t fnv1a(std::string_view text, uint64_t basis) {
  for (const char c : text) basis = (basis ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return basis;
}

std::string hash_text(uint64_t hash);                            // "xxh64:0123456789abcdef"
std::optional<uint64_t> parse_hash_text(std::string_view text);  // none if it is not of that form

}  // namespace concerto
