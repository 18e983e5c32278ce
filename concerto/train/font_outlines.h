// The letters of the pictures: outlines of the printable ASCII characters, so that pictures need no font files.
#pragma once

#include <cstdint>

namespace concerto {

constexpr int kFirstGlyph = 32, kGlyphs = 95;
constexpr double kGlyphUnits = 512;  // an em

// Glyph g begins at kGlyphNumbers[kGlyphStarts[g]]: advance, number of contours, then for each contour the number of
// its points and for each point 2 x + (1 if it lies on the curve), y. As in TrueType, curves are quadratic, y goes up
// from the baseline, and halfway between two points off the curve lies one on it.
extern const int16_t kGlyphStarts[kGlyphs];
extern const int16_t kGlyphNumbers[];

}  // namespace concerto
