// How tokens, rows or columns are cut among ranks: part r of n is [n r / parts, n (r + 1) / parts).
#pragma once

#include <cstdint>

namespace concerto {

struct Part {
  int64_t begin = 0, count = 0;
  int64_t end() const { return begin + count; }
};
constexpr int64_t part_begin(int64_t n, int64_t parts, int64_t r) { return n * r / parts; }
constexpr Part part_of(int64_t n, int64_t parts, int64_t r) {
  return {part_begin(n, parts, r), part_begin(n, parts, r + 1) - part_begin(n, parts, r)};
}

}  // namespace concerto
