#include "concerto/checkpoint/tensor_box.h"

#include <algorithm>
#include <vector>

#include "concerto/checkpoint/safetensors.h"

namespace concerto {
namespace {

struct Run {
  int64_t offset, count;
};

}  // namespace

std::string Box::str() const {
  std::string text = "[";
  for (int i = 0; i < rank(); ++i) text += fmt::format("{}{}:{}", i ? ", " : "", begin[i], begin[i] + size[i]);
  return text + "]";
}

Box whole_box(const Shape& shape) { return cut_box(shape, -1, 0, 0); }

Box cut_box(const Shape& shape, int dim, int64_t begin, int64_t count) {
  CHECK(dim < shape.rank(), "dim {} of {}", dim, shape.str());
  CHECK(dim < 0 || (begin >= 0 && count >= 0 && begin + count <= shape[dim]), "[{}, {} + {}) of dim {} of {}", begin,
        begin, count, dim, shape.str());
  Box box;
  for (int i = 0; i < shape.rank(); ++i) {
    box.begin.push_back(i == dim ? begin : 0);
    box.size.push_back(i == dim ? count : shape[i]);
  }
  return box;
}

int cut_dim_of(const Box& box, const Shape& shape) {
  int dim = -1;
  for (int i = 0; i < shape.rank(); ++i)
    if (box.size[i] != shape[i]) dim = dim == -1 ? i : -2;
  return dim;
}

Box intersection(const Box& a, const Box& b) {
  CHECK(a.rank() == b.rank(), "{} and {}", a.str(), b.str());
  Box both;
  for (int i = 0; i < a.rank(); ++i) {
    const int64_t begin = std::max(a.begin[i], b.begin[i]);
    const int64_t end = std::min(a.begin[i] + a.size[i], b.begin[i] + b.size[i]);
    both.begin.push_back(begin);
    both.size.push_back(std::max<int64_t>(0, end - begin));
  }
  return both;
}

void copy_box(const std::byte* source, DType from, const Box& source_box, void* target, DType to, const Box& target_box,
              const Box& part, Hash64* hash) {
  const int64_t from_bytes = dtype_bytes(from), to_bytes = dtype_bytes(to);
  // Runs that are short in one of the two memories are walked together, in pieces that are contiguous in both.
  constexpr int64_t kPieceBytes = 1 << 20;  // stays in the cache between hash and convert
  const int64_t most = kPieceBytes / from_bytes;
  std::vector<Run> targets;
  for_each_run(target_box, part, [&](int64_t offset, int64_t count) { targets.push_back({offset, count}); });
  size_t at = 0;
  int64_t used = 0;
  for_each_run(source_box, part, [&](int64_t offset, int64_t count) {
    while (count > 0) {
      const int64_t n = std::min({count, targets[at].count - used, most});
      const std::byte* in = source + offset * from_bytes;
      if (hash) hash->update(in, static_cast<size_t>(n * from_bytes));
      convert_elements(in, from, static_cast<char*>(target) + (targets[at].offset + used) * to_bytes, to, n);
      offset += n;
      count -= n;
      used += n;
      if (used == targets[at].count) ++at, used = 0;
    }
  });
}

}  // namespace concerto
