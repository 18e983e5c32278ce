// The reference backend: every op in plain loops, f32, bf16 (through float loads and stores) and f64, sums in double.
// Judges the others.
#pragma once

#include "concerto/ops/backend.h"

namespace concerto {
const Backend& ref_backend();
}  // namespace concerto
