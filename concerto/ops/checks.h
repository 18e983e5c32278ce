// Argument checks of ops: done once, in the op's .cc; kernels trust them.
#pragma once

#include "concerto/tensor/view.h"

namespace concerto {

inline void check_view(const View& v, Shape shape, DType dtype, const char* name) {
  CHECK(v.shape == shape, "{} is {}, wanted {}", name, v.shape.str(), shape.str());
  CHECK(v.dtype == dtype, "{} is {}, wanted {}", name, dtype_name(v.dtype), dtype_name(dtype));
}
inline void check_compute(const View& v, const char* name) {
  CHECK(v.dtype == DType::kF32 || v.dtype == DType::kBF16 || v.dtype == DType::kF64, "{} is {}", name, dtype_name(v.dtype));
}
inline void check_dense(const View& v, const char* name) { CHECK(v.dense(), "{} must be dense", name); }

}  // namespace concerto
