// In place of onednn_linear.cc where CONCERTO_ONEDNN is OFF: dense products are our own kernels.
#include "concerto/base/error.h"
#include "concerto/ops/cpu/onednn_linear.h"

namespace concerto::cpu {

bool onednn_built() { return false; }

LinearKernels onednn_linear_kernels() {
  CHECK(false, "oneDNN is not in this build");
  return {};
}

int onednn_cached_primitives() { return 0; }

}  // namespace concerto::cpu
