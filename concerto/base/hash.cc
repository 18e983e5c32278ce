#include "concerto/base/hash.h"

#include <fmt/format.h>

#include <bit>
#include <charconv>
#include <cstring>

namespace concerto {
namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87u, kPrime2 = 0xC2B2AE3D27D4EB4Fu, kPrime3 = 0x165667B19E3779F9u,
                   kPrime4 = 0x85EBCA77C2B2AE63u, kPrime5 = 0x27D4EB2F165667C5u;
constexpr std::string_view kPrefix = "xxh64:";

template <class T>
T load(const unsigned char* p) {
  static_assert(std::endian::native == std::endian::little);
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

uint64_t round(uint64_t lane, uint64_t input) { return std::rotl(lane + input * kPrime2, 31) * kPrime1; }
uint64_t merge(uint64_t hash, uint64_t lane) { return (hash ^ round(0, lane)) * kPrime1 + kPrime4; }

}  // namespace

void Hash64::block(const unsigned char* p) {
  for (int i = 0; i < 4; ++i) lanes_[i] = round(lanes_[i], load<uint64_t>(p + 8 * i));
}

void Hash64::update(const void* data, size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  total_ += bytes;
  if (pending_bytes_ > 0) {
    const size_t take = std::min(bytes, sizeof pending_ - pending_bytes_);
    if (take > 0) std::memcpy(pending_ + pending_bytes_, p, take);
    pending_bytes_ += take;
    p += take;
    bytes -= take;
    if (pending_bytes_ < sizeof pending_) return;
    block(pending_);
    pending_bytes_ = 0;
  }
  for (; bytes >= 32; p += 32, bytes -= 32) block(p);
  if (bytes > 0) std::memcpy(pending_, p, bytes);
  pending_bytes_ = bytes;
}

uint64_t Hash64::digest() const {
  uint64_t h = kPrime5;
  if (total_ >= 32) {
    h = std::rotl(lanes_[0], 1) + std::rotl(lanes_[1], 7) + std::rotl(lanes_[2], 12) + std::rotl(lanes_[3], 18);
    for (uint64_t lane : lanes_) h = merge(h, lane);
  }
  h += total_;
  const unsigned char *p = pending_, *end = pending_ + pending_bytes_;
  for (; end - p >= 8; p += 8) h = std::rotl(h ^ round(0, load<uint64_t>(p)), 27) * kPrime1 + kPrime4;
  for (; end - p >= 4; p += 4) h = std::rotl(h ^ load<uint32_t>(p) * kPrime1, 23) * kPrime2 + kPrime3;
  for (; p < end; ++p) h = std::rotl(h ^ *p * kPrime5, 11) * kPrime1;
  h = (h ^ (h >> 33)) * kPrime2;
  h = (h ^ (h >> 29)) * kPrime3;
  return h ^ (h >> 32);
}

uint64_t hash64(const void* data, size_t bytes) {
  Hash64 hash;
  hash.update(data, bytes);
  return hash.digest();
}

std::string hash_text(uint64_t hash) { return fmt::format("{}{:016x}", kPrefix, hash); }

std::optional<uint64_t> parse_hash_text(std::string_view text) {
  if (!text.starts_with(kPrefix) || text.size() != kPrefix.size() + 16) return std::nullopt;
  uint64_t value = 0;
  const auto error = std::from_chars(text.data() + kPrefix.size(), text.data() + text.size(), value, 16).ec;
  if (error != std::errc() || hash_text(value) != text) return std::nullopt;  // one spelling: no upper case
  return value;
}

}  // namespace concerto
