// Small things over whole tensors. Views may be strided rows; shapes must agree.
#pragma once

#include "concerto/ops/context.h"

namespace concerto {

struct Add {  // out = a + b; out may be a or b
  View a, b, out;
};
struct Cast {  // out = in in another float type (or the same: a copy); round to nearest even
  View in, out;
};
struct SumSquares {  // *out += sum of x^2 in f64, over fixed blocks in order: the same for any number of threads
  View x;            // stat, dense
  View out;          // [1] f64
};

struct ElementwiseKernels {
  void (*add)(const Context&, const Add&) = nullptr;
  void (*cast)(const Context&, const Cast&) = nullptr;
  void (*sum_squares)(const Context&, const SumSquares&) = nullptr;
};

void add(const Context& ctx, const Add& args);
void cast(const Context& ctx, const Cast& args);
void sum_squares(const Context& ctx, const SumSquares& args);
void fill_zero(const Context& ctx, View x);  // any type

}  // namespace concerto
