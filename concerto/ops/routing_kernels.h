// The table of routing.h's kernels for a backend on processors. `R` says how it does a row of E numbers in the stat
// type R::S:
//   softmax(z, p, n), softmax_backward(p, dp, dz, n) with dz that may be dp, log_sum_exp(z, n), sigmoid(z, p, n),
//   top_k(s, n, k, ids): the k largest of s (may destroy it), largest first, ties to the lower index
#pragma once

#include "concerto/ops/orthogonal_loops.h"
#include "concerto/ops/routing_choice_loops.h"

namespace concerto::routing {

template <class R>
constexpr RoutingKernels kernels() {
  return {.scores = Loops<R>::scores,
          .choose = ChoiceLoops<R>::choose,
          .drop = drop,
          .weights = Loops<R>::weights,
          .sums = Loops<R>::sums,
          .balance = Loops<R>::balance,
          .backward = Loops<R>::backward,
          .orthogonal_loss = orthogonal_loss<typename R::S>,
          .orthogonal_step = orthogonal_step<typename R::S>,
          .bias_update = Loops<R>::bias_update,
          .clear_dropped = clear_dropped,
          .pad_dispatch = pad_dispatch_any,
          .pad_combine = pad_combine_any};
}

}  // namespace concerto::routing
