// The packing of weights for the products of product.h (ops/packed_weight.h).
#pragma once

#include "concerto/ops/cpu/isa.h"
#include "concerto/ops/packed_weight.h"

namespace concerto::cpu {

// For bf16 weights. Null where words hold one element: packed, a weight would be twice as large.
const WeightPacking* weight_packing(Isa isa);

// Panels of `nr` columns of a packed matrix lie this many words of four bytes apart, and matrices `matrix_words`.
struct PackedPanels {
  int64_t panel_words, matrix_words;
};
struct ProductKernels;
PackedPanels packed_panels(const ProductKernels& kernels, int64_t columns, int64_t reduction);

}  // namespace concerto::cpu
