#include "concerto/ops/context.h"

#include "concerto/ops/checks.h"

namespace concerto {

const char* op_family_name(OpFamily family) {
  switch (family) {
    case OpFamily::kDense:
      return "dense";
    case OpFamily::kExperts:
      return "experts";
    case OpFamily::kAttention:
      return "attention";
    case OpFamily::kNorm:
      return "norm";
    case OpFamily::kRouter:
      return "router";
    case OpFamily::kPermute:
      return "permute";
    case OpFamily::kEmbedding:
      return "embedding";
    case OpFamily::kHead:
      return "head";
    case OpFamily::kElementwise:
      return "elementwise";
    case OpFamily::kOptimizer:
      return "optimizer";
    case OpFamily::kCount:
      break;
  }
  return "?";
}

bool overlap(const View& a, const View& b) {
  if (!a.data || !b.data || a.elements() == 0 || b.elements() == 0) return false;
  const int64_t a_row = a.row_stride * dtype_bytes(a.dtype), b_row = b.row_stride * dtype_bytes(b.dtype);
  const int64_t a_cols = a.cols() * dtype_bytes(a.dtype), b_cols = b.cols() * dtype_bytes(b.dtype);
  const auto a_begin = reinterpret_cast<intptr_t>(a.data), b_begin = reinterpret_cast<intptr_t>(b.data);
  const intptr_t a_end = a_begin + (a.rows() - 1) * a_row + a_cols, b_end = b_begin + (b.rows() - 1) * b_row + b_cols;
  if (a_end <= b_begin || b_end <= a_begin) return false;
  if (a_row != b_row || a_row == 0) return true;
  const int64_t shift = ((b_begin - a_begin) % a_row + a_row) % a_row;  // b's first column, counted from a's
  return shift < a_cols || a_row - shift < b_cols;
}

}  // namespace concerto
