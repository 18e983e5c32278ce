// For tests: reads the PNG files that png.h writes, against the descriptions of PNG and deflate (RFC 1951), sharing
// nothing with the writer but crc32().
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "concerto/train/crc.h"

namespace concerto {

struct TestPng {
  int64_t width = 0, height = 0;
  std::string palette;
  std::vector<uint8_t> pixels;
};

inline uint32_t big_endian(std::string_view bytes) {
  uint32_t v = 0;
  for (size_t i = 0; i < 4; ++i) v = v << 8 | static_cast<uint8_t>(bytes.at(i));
  return v;
}

// One block with the fixed codes. Failures end in a string that is too short.
inline std::string inflate_fixed(std::string_view in) {
  size_t bit = 0;
  const auto next = [&] {
    const size_t at = bit++;
    return at / 8 < in.size() ? static_cast<uint32_t>(static_cast<uint8_t>(in[at / 8]) >> (at % 8)) & 1 : 0;
  };
  const auto number = [&](int count) {
    uint32_t v = 0;
    for (int i = 0; i < count; ++i) v |= next() << i;
    return v;
  };
  const auto code = [&](int count, uint32_t v = 0) {
    for (int i = 0; i < count; ++i) v = v << 1 | next();
    return v;
  };
  EXPECT_EQ(number(1), 1u) << "the last block";
  EXPECT_EQ(number(2), 1u) << "fixed codes";
  std::string out;
  while (bit / 8 < in.size()) {
    uint32_t v = code(7), symbol = 0;
    if (v <= 0x17) {
      symbol = 256 + v;
    } else if (v = code(1, v); v >= 0x30 && v <= 0xbf) {
      symbol = v - 0x30;
    } else if (v >= 0xc0 && v <= 0xc7) {
      symbol = 280 + v - 0xc0;
    } else {
      symbol = 144 + code(1, v) - 0x190;
    }
    if (symbol < 256) {
      out.push_back(static_cast<char>(symbol));
      continue;
    }
    if (symbol == 256) return out;
    static constexpr int kBase[29] = {3,  4,  5,  6,  7,  8,  9,  10, 11,  13,  15,  17,  19,  23, 27,
                                      31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258};
    static constexpr int kExtra[29] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2,
                                       2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0};
    if (symbol > 285) break;
    const size_t length = static_cast<size_t>(kBase[symbol - 257]) + number(kExtra[symbol - 257]);
    EXPECT_EQ(code(5), 0u) << "distance 1";
    if (out.empty()) break;
    out.append(length, out.back());
  }
  ADD_FAILURE() << "no end of the block";
  return out;
}

inline TestPng read_png(std::string_view file) {
  TestPng png;
  std::string packed, names;
  EXPECT_EQ(file.substr(0, 8), std::string_view("\x89PNG\r\n\x1a\n"));
  for (size_t at = 8; at + 12 <= file.size();) {
    const size_t length = big_endian(file.substr(at));
    if (at + 12 + length > file.size()) {
      ADD_FAILURE() << "a chunk that is too long";
      return png;
    }
    const std::string_view name = file.substr(at + 4, 4), body = file.substr(at + 8, length);
    EXPECT_EQ(big_endian(file.substr(at + 8 + length)), crc32(file.substr(at + 4, length + 4)));
    names += name;
    if (name == "IHDR") {
      png.width = big_endian(body);
      png.height = big_endian(body.substr(4));
      EXPECT_EQ(body.substr(8), std::string_view("\x08\x03\0\0\0", 5));
    } else if (name == "PLTE") {
      png.palette = body;
    } else if (name == "IDAT") {
      packed += body;
    }
    at += 12 + length;
  }
  EXPECT_EQ(names, "IHDRPLTEIDATIEND");
  EXPECT_EQ(packed.substr(0, 2), "\x78\x01");
  const std::string rows = inflate_fixed(std::string_view(packed).substr(2, packed.size() - 6));
  uint32_t a = 1, b = 0;
  for (const char c : rows) {
    a = (a + static_cast<uint8_t>(c)) % 65521;
    b = (b + a) % 65521;
  }
  EXPECT_EQ(big_endian(packed.substr(packed.size() - 4)), b << 16 | a);
  EXPECT_EQ(static_cast<int64_t>(rows.size()), png.height * (png.width + 1));
  if (static_cast<int64_t>(rows.size()) != png.height * (png.width + 1)) return png;
  const auto width = static_cast<size_t>(png.width);
  for (size_t y = 0; y < static_cast<size_t>(png.height); ++y) {
    const char filter = rows[y * (width + 1)];
    EXPECT_TRUE(filter == 1 || filter == 2);
    for (size_t x = 0; x < width; ++x) {
      const uint8_t before = filter == 1 ? (x > 0 ? png.pixels.back() : 0) : png.pixels[(y - 1) * width + x];
      png.pixels.push_back(static_cast<uint8_t>(rows[y * (width + 1) + 1 + x] + before));
    }
  }
  return png;
}

}  // namespace concerto
