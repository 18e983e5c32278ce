#include <algorithm>

#include "concerto/ops/ref/kernels.h"

namespace concerto::ref {
namespace {

void add(const Context& ctx, const Add& a) {
  if (ctx.dry_run) return;
  with_types(a.a.dtype, [&]<class C, class S>() {
    for (int64_t r = 0; r < a.a.rows(); ++r)
      for (int64_t c = 0; c < a.a.cols(); ++c)
        store(row_of<C>(a.out, r)[c], load(row_of<C>(a.a, r)[c]) + load(row_of<C>(a.b, r)[c]));
  });
}

void cast(const Context& ctx, const Cast& a) {
  if (ctx.dry_run) return;
  with_types(a.in.dtype, [&]<class In, class>() {
    with_types(a.out.dtype, [&]<class Out, class>() {
      for (int64_t r = 0; r < a.in.rows(); ++r)
        for (int64_t c = 0; c < a.in.cols(); ++c) store(row_of<Out>(a.out, r)[c], load(row_of<In>(a.in, r)[c]));
    });
  });
}

void sum_squares(const Context& ctx, const SumSquares& a) {
  if (ctx.dry_run) return;
  constexpr int64_t kBlock = 4096;
  with_stat(a.x.dtype, [&]<class S>() {
    const S* x = a.x.as<S>();
    double total = 0;
    for (int64_t begin = 0; begin < a.x.elements(); begin += kBlock) {
      double sum = 0;
      for (int64_t i = begin; i < std::min(begin + kBlock, a.x.elements()); ++i) sum += load(x[i]) * load(x[i]);
      total += sum;
    }
    *a.out.as<double>() += total;
  });
}

}  // namespace

ElementwiseKernels elementwise() { return {.add = add, .cast = cast, .sum_squares = sum_squares}; }

}  // namespace concerto::ref
