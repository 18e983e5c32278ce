// UTF-8, one character at a time.
#pragma once

#include <cstdint>
#include <string_view>

namespace concerto {

// The bytes of the character at the front of `text`; 0 when they are no UTF-8; -1 when `text` ends inside a character.
// Neither surrogates nor overlong forms.
inline int utf8_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  if (text.empty()) return -1;
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  if (first < 0xc2 || first > 0xf4) return 0;
  const int length = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  for (int i = 1; i < length; ++i) {
    if (static_cast<size_t>(i) >= text.size()) return -1;
    const uint8_t low = i > 1 ? 0x80 : first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
    const uint8_t high = i > 1 ? 0xbf : first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
    if (byte(i) < low || byte(i) > high) return 0;
  }
  return length;
}

// Where the first byte that is no UTF-8 stands; npos: nowhere.
inline size_t find_invalid_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const int length = static_cast<uint8_t>(text[i]) < 0x80 ? 1 : utf8_length(text.substr(i));
    if (length <= 0) return i;
    i += length;
  }
  return std::string_view::npos;
}

}  // namespace concerto
