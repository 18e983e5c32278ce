#include "concerto/ops/elementwise.h"

#include <cstring>

#include "concerto/ops/backend.h"
#include "concerto/ops/checks.h"

namespace concerto {

void add(const Context& ctx, const Add& args) {
  check_compute(args.a, "add.a");
  check_view(args.b, args.a.shape, args.a.dtype, "add.b");
  check_view(args.out, args.a.shape, args.a.dtype, "add.out");
  check_memory(ctx, {args.a, args.b, args.out});
  for (const View& in : {args.a, args.b})
    if (!same_memory(in, args.out)) check_apart(args.out, {in}, "add.out");
  if (args.a.elements() == 0) return;
  run_kernel(ctx, OpFamily::kElementwise, ctx.backend->elementwise.add, args, "add");
}

void cast(const Context& ctx, const Cast& args) {
  check_compute(args.in, "cast.in");
  check_compute(args.out, "cast.out");
  CHECK(args.in.shape == args.out.shape, "cast.in {}, cast.out {}", args.in.shape.str(), args.out.shape.str());
  check_memory(ctx, {args.in, args.out});
  check_apart(args.out, {args.in}, "cast.out");
  if (args.in.elements() == 0) return;
  run_kernel(ctx, OpFamily::kElementwise, ctx.backend->elementwise.cast, args, "cast");
}

void sum_squares(const Context& ctx, const SumSquares& args) {
  CHECK(args.x.dtype == DType::kF32 || args.x.dtype == DType::kF64, "sum_squares.x is {}", dtype_name(args.x.dtype));
  check_dense(args.x, "sum_squares.x");
  check_view(args.out, {1}, DType::kF64, "sum_squares.out");
  check_memory(ctx, {args.x, args.out});
  check_apart(args.out, {args.x}, "sum_squares.out");
  if (args.x.elements() == 0) return;
  run_kernel(ctx, OpFamily::kElementwise, ctx.backend->elementwise.sum_squares, args, "sum_squares");
}

void fill_zero(const Context& ctx, View x) {
  CHECK(x.device == Device::kCpu);
  check_memory(ctx, {x});
  if (x.elements() == 0 || ctx.dry_run) return;
  OpScope scope(ctx, OpFamily::kElementwise);
  char* data = static_cast<char*>(x.data);
  if (x.dense()) {
    ctx.pool->parallel_for(x.bytes(), int64_t{1} << 18, [&](int64_t begin, int64_t end, int) {
      std::memset(data + begin, 0, static_cast<size_t>(end - begin));
    });
    return;
  }
  const int64_t row = x.cols() * dtype_bytes(x.dtype), stride = x.row_stride * dtype_bytes(x.dtype);
  ctx.pool->parallel_for(x.rows(), 64, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) std::memset(data + r * stride, 0, static_cast<size_t>(row));
  });
}

}  // namespace concerto
