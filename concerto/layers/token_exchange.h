// Tensor and sequence parallelism as layers see it. The tokens of a micro-batch are cut among the ranks of a tensor
// parallel group (Tokens::local; base/part.h): the residual stream, norms and the router work on a rank's
// own tokens; products work on all tokens and the rank's slice of the weight. Between the two stand these exchanges. A
// layer has a null pointer where there is one rank. Implemented in parallel/, over a communicator; in a dry run nothing
// is sent.
#pragma once

#include "concerto/ops/context.h"

namespace concerto {

class TokenExchange {
 public:
  virtual ~TokenExchange() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Own rows [T_r, C] -> the rows of all ranks [T, C], in token order. Any type.
  virtual void gather(const Context& ctx, View local, View all) const = 0;
  // A rank's share of a sum [T, C] -> the sum's own rows [T_r, C], added in rank order. Stat type; `local` of the same.
  virtual void reduce_scatter(const Context& ctx, View partial, View local) const = 0;
  // Every rank's `mine` [R, C] -> all [size * R, C].
  virtual void gather_parts(const Context& ctx, View mine, View all) const = 0;
};

// Rows of ranks that hold different tokens, as many each as it has.
class RowExchange {
 public:
  virtual ~RowExchange() = default;
  // Own rows -> those of all ranks, in rank order. Any type.
  virtual void gather(const Context& ctx, View own, View all) const = 0;
};

}  // namespace concerto
