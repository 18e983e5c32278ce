// Parts of tensors: a rank's shard, a stored slice and what the two have in common are boxes of the whole tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "concerto/base/hash.h"
#include "concerto/tensor/view.h"

namespace concerto {

// Elements [begin, begin + size) of every dim.
struct Box {
  Shape begin, size;
  int rank() const { return size.rank(); }
  int64_t elements() const { return size.elements(); }
  bool empty() const { return elements() == 0; }
  bool operator==(const Box&) const = default;
  std::string str() const;  // "[0:4, 8:16]"
};

Box whole_box(const Shape& shape);
// [begin, begin + count) of dim `dim`, all of the others; dim < 0: all.
Box cut_box(const Shape& shape, int dim, int64_t begin, int64_t count);
// The dim in which the box is less than the shape; -1: in none; -2: in more than one, which no layout does.
int cut_dim_of(const Box& box, const Shape& shape);
// Of two boxes of one rank; empty() if they have nothing in common.
Box intersection(const Box& a, const Box& b);

// f(offset in outer, elements) for every contiguous run of `part` in the dense memory of `outer`, which contains it, in
// the order of memory.
template <class F>
void for_each_run(const Box& outer, const Box& part, F&& f) {
  if (part.empty()) return;
  const int rank = part.rank();
  // Dims [d, rank) of the part are one run: all but the first of them are as wide as outer's.
  int d = rank;
  int64_t run = 1;
  while (d > 0) {
    run *= part.size[--d];
    if (part.size[d] != outer.size[d]) break;
  }
  int64_t index[Shape::kMaxRank] = {};
  while (true) {
    int64_t offset = 0;
    for (int i = 0; i < rank; ++i)
      offset = offset * outer.size[i] + part.begin[i] - outer.begin[i] + (i < d ? index[i] : 0);
    f(offset, run);
    int i = d - 1;
    while (i >= 0 && ++index[i] == part.size[i]) index[i--] = 0;
    if (i < 0) return;
  }
}

// Copies `part` from the dense memory of one box into that of another, both of which contain it, converting elements as
// copy_tensor does. `source` may be unaligned. `hash`, if given, takes the bytes read, in the order of source memory.
void copy_box(const std::byte* source, DType from, const Box& source_box, void* target, DType to, const Box& target_box,
              const Box& part, Hash64* hash = nullptr);

}  // namespace concerto
