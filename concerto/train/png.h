// PNG pictures of at most 256 colours, written by hand: TensorBoard wants them, and a steady step may not allocate,
// which no library promises.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

namespace concerto {

using Rgb = std::array<uint8_t, 3>;

// Puts the picture into `out`, overwritten. `pixels` are [height, width] places in the palette, all below its size (at
// most 256). Equal neighbours take almost no room: deflate with fixed codes, and matches only with what is one byte
// back. Allocates nothing if `out` has room for png_bound bytes.
void encode_png(std::span<const uint8_t> pixels, int64_t width, int64_t height, std::span<const Rgb> palette,
                std::string& out);
// More bytes than any picture of this size takes.
int64_t png_bound(int64_t width, int64_t height);

}  // namespace concerto
