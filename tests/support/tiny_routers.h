// A router of every kind in a small model, for tests that must hold for all of them.
#pragma once

#include <iosfwd>
#include <vector>

#include "concerto/config/run_config.h"

namespace concerto::test {

struct TinyRouter {
  const char* name;
  ModelConfig config;
  RoutingOptions options;
  bool drops = false;     // capacity binds
  bool sinkhorn = false;  // choices look at other tokens
};
void PrintTo(const TinyRouter& router, std::ostream* out);

// Top-k with softmax, sigmoid and groups; capacity with both drop orders and reverse; top-2 with Sinkhorn; the balance
// loss pooled and per layer, of all and of first choices; the z loss.
std::vector<TinyRouter> tiny_routers();

ModelConfig tiny_moe_with_router_losses();  // balance and z, to be trained per layer

}  // namespace concerto::test
