// Argument checks of ops: done once, in the op's .cc; kernels trust them.
#pragma once

#include <initializer_list>

#include "concerto/ops/packed_weight.h"
#include "concerto/tensor/view.h"

namespace concerto {

// Whether an optional argument is there. Asks the shape, not the pointer: in a dry run every pointer is null and
// scratch must not change.
inline bool is_given(const View& v) { return v.shape.rank() > 0; }

inline void check_view(const View& v, Shape shape, DType dtype, const char* name) {
  CHECK(v.shape == shape, "{} is {}, wanted {}", name, v.shape.str(), shape.str());
  CHECK(v.dtype == dtype, "{} is {}, wanted {}", name, dtype_name(v.dtype), dtype_name(dtype));
}
inline void check_compute(const View& v, const char* name) {
  CHECK(v.dtype == DType::kF32 || v.dtype == DType::kBF16 || v.dtype == DType::kF64, "{} is {}", name,
        dtype_name(v.dtype));
}
inline void check_dense(const View& v, const char* name) { CHECK(v.dense(), "{} must be dense", name); }
inline void check_rank(const View& v, int rank, const char* name) {
  CHECK(v.shape.rank() == rank, "{} is {}, wanted rank {}", name, v.shape.str(), rank);
}
// For outputs that may be of the compute type or of its stat type.
inline void check_compute_or_stat(const View& v, Shape shape, DType compute, const char* name) {
  CHECK(v.shape == shape, "{} is {}, wanted {}", name, v.shape.str(), shape.str());
  CHECK(v.dtype == compute || v.dtype == stat_dtype(compute), "{} is {}", name, dtype_name(v.dtype));
}
// In a real run each view that has elements has memory.
inline void check_memory(const Context& ctx, std::initializer_list<View> views) {
  if (ctx.dry_run) return;
  for (const View& v : views) CHECK(v.data || v.elements() == 0, "null view of shape {}", v.shape.str());
}

// A weight that is packed has the same shape, needs no memory of its own, and is packed as this backend reads it.
inline void check_weight_memory(const Context& ctx, const View& w, const PackedWeight& packed,
                                const WeightPacking* packing) {
  if (!packed) return check_memory(ctx, {w});
  CHECK(packed.packing == packing, "a weight packed for other products");
  CHECK(packed.groups == (w.shape.rank() == 3 ? w.dim(0) : 1), "{} packed groups for {}", packed.groups, w.shape.str());
  CHECK(packed.groups * packed.n == w.rows() && packed.k == w.cols(), "packed [{}, {}, {}] for {}", packed.groups,
        packed.n, packed.k, w.shape.str());
  CHECK(w.dtype == DType::kBF16 && packed.forward && packed.backward, "packed weight");
}

// Whether two views share an element. Column slices of one buffer (the same row stride) may interleave without sharing.
bool overlap(const View& a, const View& b);
inline void check_apart(const View& out, std::initializer_list<View> inputs, const char* name) {
  for (const View& in : inputs) CHECK(!overlap(out, in), "{} may not share memory with another argument", name);
}
// For outputs that may be an input exactly, element on element.
inline bool same_memory(const View& a, const View& b) {
  return a.data == b.data && a.row_stride == b.row_stride && a.dtype == b.dtype;
}

// Counts the op in the profile and calls the backend's kernel.
template <class Args>
void run_kernel(const Context& ctx, OpFamily family, void (*kernel)(const Context&, const Args&), const Args& args,
                const char* name) {
  CHECK(kernel, "the backend has no {}", name);
  OpScope scope(ctx, family);
  kernel(ctx, args);
}

}  // namespace concerto
