#include "concerto/ops/cuda/cuda_backend.h"

namespace concerto {

const Backend& cuda_backend() {
  throw Error(ErrorCode::kUnsupported, "backend", "cuda is planned, not built", "Use cpu or ref.");
}

}  // namespace concerto
