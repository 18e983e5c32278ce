#include "concerto/train/png.h"

#include <algorithm>
#include <string_view>

#include "concerto/base/error.h"
#include "concerto/train/crc.h"

namespace concerto {
namespace {

void put_big_endian(std::string& out, uint32_t v) {
  for (int shift = 24; shift >= 0; shift -= 8) out.push_back(static_cast<char>(v >> shift));
}

size_t begin_chunk(std::string& out, std::string_view name) {
  const size_t start = out.size();
  out.append(4, '\0');  // the length, when it is known
  out.append(name);
  return start;
}

void end_chunk(std::string& out, size_t start) {
  const auto length = static_cast<uint32_t>(out.size() - start - 8);
  for (size_t i = 0; i < 4; ++i) out[start + i] = static_cast<char>(length >> (24 - 8 * i));
  put_big_endian(out, crc32(std::string_view(out).substr(start + 4)));
}

// One deflate block (RFC 1951) with the fixed codes; bytes that repeat become matches of distance 1.
class RunDeflater {
 public:
  explicit RunDeflater(std::string& out) : out_(out) {
    bits(1, 1);  // the last block
    bits(1, 2);  // fixed codes
  }

  void put(uint8_t byte, int64_t count) {
    while (count > 0) {
      if (byte == last_ && count >= kShortest) {
        const int64_t length = std::min<int64_t>(count, kLongest);
        match(static_cast<uint32_t>(length));
        count -= length;
      } else {
        literal(byte);
        last_ = byte;
        --count;
      }
    }
  }

  void finish() {
    code(256);
    if (used_ > 0) bits(0, 8 - used_);
  }

 private:
  static constexpr int64_t kShortest = 3, kLongest = 258;

  void bits(uint32_t value, int count) {
    held_ |= value << used_;
    for (used_ += count; used_ >= 8; used_ -= 8, held_ >>= 8) out_.push_back(static_cast<char>(held_));
  }
  void reversed(uint32_t value, int count) {  // Huffman codes begin with their highest bit
    uint32_t turned = 0;
    for (int i = 0; i < count; ++i) turned |= ((value >> i) & 1) << (count - 1 - i);
    bits(turned, count);
  }
  void code(uint32_t symbol) {
    if (symbol < 144) return reversed(0x30 + symbol, 8);
    if (symbol < 256) return reversed(0x190 + symbol - 144, 9);
    if (symbol < 280) return reversed(symbol - 256, 7);
    reversed(0xc0 + symbol - 280, 8);
  }
  void literal(uint8_t byte) { code(byte); }
  void match(uint32_t length) {
    if (length == kLongest) {
      code(285);
    } else {
      // Lengths 3 to 10 have a symbol each; then groups of four symbols, each group with one extra bit more.
      uint32_t extra = 0, offset = length - 3;
      if (offset >= 8) {
        for (extra = 1; offset >= (8u << extra);) ++extra;
        code(257 + 4 * extra + (offset >> extra));
      } else {
        code(257 + offset);
      }
      bits(offset & ((1u << extra) - 1), static_cast<int>(extra));
    }
    reversed(0, 5);  // distance 1
  }

  std::string& out_;
  uint32_t held_ = 0;
  int used_ = 0;
  int last_ = -1;  // the byte before; -1: none
};

class Adler {
 public:
  void add(uint8_t byte, int64_t count) {
    // b takes the sum of a after each byte: a + byte, a + 2 byte, ...
    const auto n = static_cast<uint64_t>(count);
    b_ = (b_ + n * a_ + n * (n + 1) / 2 % kModulus * byte) % kModulus;
    a_ = (a_ + n * byte) % kModulus;
  }
  uint32_t value() const { return static_cast<uint32_t>(b_ << 16 | a_); }

 private:
  static constexpr uint64_t kModulus = 65521;
  uint64_t a_ = 1, b_ = 0;
};

int64_t changes(const uint8_t* a, const uint8_t* b, int64_t n) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += a[i] != b[i];
  return count;
}

}  // namespace

int64_t png_bound(int64_t width, int64_t height) {
  constexpr int64_t kHeads = 1024;                                      // signature, header, palette, ends of chunks
  return kHeads + height * (width + 1) + height * (width + 1) / 8 + 8;  // 9 bits a byte at worst
}

void encode_png(std::span<const uint8_t> pixels, int64_t width, int64_t height, std::span<const Rgb> palette,
                std::string& out) {
  CHECK(width > 0 && height > 0 && static_cast<int64_t>(pixels.size()) == width * height);
  CHECK(!palette.empty() && palette.size() <= 256);
  constexpr uint8_t kSub = 1, kUp = 2;  // filters: the difference from the pixel on the left, from the one above
  out.clear();
  out.reserve(static_cast<size_t>(png_bound(width, height)));
  out.append("\x89PNG\r\n\x1a\n", 8);
  size_t chunk = begin_chunk(out, "IHDR");
  put_big_endian(out, static_cast<uint32_t>(width));
  put_big_endian(out, static_cast<uint32_t>(height));
  out.append("\x08\x03\0\0\0", 5);  // 8 bits, palette, deflate, the usual filters, not interlaced
  end_chunk(out, chunk);
  chunk = begin_chunk(out, "PLTE");
  for (const Rgb& color : palette) out.append(reinterpret_cast<const char*>(color.data()), color.size());
  end_chunk(out, chunk);

  chunk = begin_chunk(out, "IDAT");
  out.append("\x78\x01", 2);  // a zlib stream
  RunDeflater deflater(out);
  Adler adler;
  for (int64_t y = 0; y < height; ++y) {
    const uint8_t* row = pixels.data() + y * width;
    const uint8_t filter = y > 0 && changes(row, row - width, width) <= changes(row + 1, row, width - 1) ? kUp : kSub;
    deflater.put(filter, 1);
    adler.add(filter, 1);
    const auto difference = [&](int64_t x) {
      const uint8_t before = filter == kUp ? row[x - width] : x > 0 ? row[x - 1] : uint8_t{0};
      return static_cast<uint8_t>(row[x] - before);
    };
    for (int64_t x = 0; x < width;) {
      const uint8_t first = difference(x);
      int64_t run = 1;
      while (x + run < width && difference(x + run) == first) ++run;
      deflater.put(first, run);
      adler.add(first, run);
      x += run;
    }
  }
  deflater.finish();
  put_big_endian(out, adler.value());
  end_chunk(out, chunk);
  end_chunk(out, begin_chunk(out, "IEND"));
}

}  // namespace concerto
