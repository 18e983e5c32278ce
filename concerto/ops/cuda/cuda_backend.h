// The CUDA backend: planned. Until it is built, asking for it is an error that says so.
#pragma once

#include "concerto/ops/backend.h"

namespace concerto {
const Backend& cuda_backend();  // Error(kUnsupported)
}  // namespace concerto
