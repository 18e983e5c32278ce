#include "concerto/ops/rope.h"

#include <cmath>

#include "concerto/ops/backend.h"
#include "concerto/ops/checks.h"

namespace concerto {
namespace {

template <class S>
void fill(View cos_sin, double theta) {
  const int64_t dim = cos_sin.dim(1);
  for (int64_t p = 0; p < cos_sin.dim(0); ++p) {
    S* row = cos_sin.as<S>() + p * cos_sin.row_stride;
    for (int64_t j = 0; j < dim / 2; ++j) {
      const double angle =
          static_cast<double>(p) * std::pow(theta, -2.0 * static_cast<double>(j) / static_cast<double>(dim));
      row[2 * j] = static_cast<S>(std::cos(angle));
      row[2 * j + 1] = static_cast<S>(std::sin(angle));
    }
  }
}

}  // namespace

void rope_apply(const Context& ctx, const Rope& args) {
  check_compute(args.x, "rope.x");
  check_rank(args.x, 2, "rope.x");
  check_rank(args.cos_sin, 2, "rope.cos_sin");
  const int64_t rows = args.x.dim(0), head_dim = args.cos_sin.dim(1);
  CHECK(head_dim > 0 && head_dim % 2 == 0, "head_dim {}", head_dim);
  CHECK(args.x.dim(1) % head_dim == 0, "rope.x has {} columns, head_dim is {}", args.x.dim(1), head_dim);
  CHECK(args.cos_sin.dtype == stat_dtype(args.x.dtype), "rope.cos_sin is {}", dtype_name(args.cos_sin.dtype));
  check_dense(args.cos_sin, "rope.cos_sin");
  check_view(args.positions, {rows}, DType::kI32, "rope.positions");
  check_memory(ctx, {args.x, args.positions, args.cos_sin});
  check_apart(args.x, {args.positions, args.cos_sin}, "rope.x");
  if (rows == 0) return;
  run_kernel(ctx, OpFamily::kAttention, ctx.backend->rope.apply, args, "rope_apply");
}

void rope_fill_table(View cos_sin, double theta) {
  check_rank(cos_sin, 2, "cos_sin");
  CHECK(cos_sin.dim(1) % 2 == 0 && theta > 0, "head_dim {} theta {}", cos_sin.dim(1), theta);
  CHECK(cos_sin.dtype == DType::kF32 || cos_sin.dtype == DType::kF64, "cos_sin is {}", dtype_name(cos_sin.dtype));
  if (!cos_sin.data) return;  // of a counting arena
  cos_sin.dtype == DType::kF32 ? fill<float>(cos_sin, theta) : fill<double>(cos_sin, theta);
}

}  // namespace concerto
