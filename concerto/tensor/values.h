// The values of a view for code that looks at tensors (comparison, diagnosis), not for kernels.
#pragma once

#include <vector>

#include "concerto/tensor/view.h"

namespace concerto {

// Any of f32, f64, bf16, i32, i64. [rows * cols], row by row, without the gaps between strided rows.
std::vector<double> to_doubles(View v);
// Integers always are.
bool all_finite(View v);

}  // namespace concerto
