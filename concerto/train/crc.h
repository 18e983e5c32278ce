// Check sums of the file formats written here.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace concerto {

template <uint32_t Polynomial>  // reflected
constexpr std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? Polynomial : 0u);
    table[i] = crc;
  }
  return table;
}

template <uint32_t Polynomial>
uint32_t crc_of(std::string_view bytes) {
  static constexpr auto kTable = make_crc_table<Polynomial>();
  uint32_t crc = ~0u;
  for (const char c : bytes) crc = kTable[(crc ^ static_cast<uint8_t>(c)) & 0xff] ^ (crc >> 8);
  return ~crc;
}

inline uint32_t crc32(std::string_view bytes) { return crc_of<0xedb88320u>(bytes); }   // PNG
inline uint32_t crc32c(std::string_view bytes) { return crc_of<0x82f63b78u>(bytes); }  // Castagnoli: TFRecord

}  // namespace concerto
