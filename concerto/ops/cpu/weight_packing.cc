#include "concerto/ops/cpu/weight_packing.h"

#include "concerto/ops/cpu/product.h"
#include "concerto/ops/cpu/product_kernels.h"

namespace concerto::cpu {
namespace {

template <Isa kIsa>
const ProductKernels& kernels_of() {
  return product_kernels(kIsa, true);
}

template <Isa kIsa>
int64_t forward_bytes(int64_t n, int64_t k) {
  return packed_panels(kernels_of<kIsa>(), n, k).matrix_words * 4;
}
template <Isa kIsa>
int64_t backward_bytes(int64_t n, int64_t k) {
  return packed_panels(kernels_of<kIsa>(), k, n).matrix_words * 4;
}

// Rows are columns of the forward product and words of the backward one. Pieces are whole panels of the one and whole
// words of the other, so that none writes where another does.
template <Isa kIsa>
void pack(const bf16* piece, int64_t row, int64_t rows, int64_t column, int64_t columns, int64_t n, int64_t k,
          char* forward, char* backward) {
  const ProductKernels& kernels = kernels_of<kIsa>();
  const int64_t forward_panel = packed_panels(kernels, n, k).panel_words,
                backward_panel = packed_panels(kernels, k, n).panel_words, unit = kernels.unit, nr = kernels.nr;
  kernels.pack_b_rows[kSourceBF16](piece, columns, rows, columns,
                                   reinterpret_cast<uint32_t*>(forward) + row / nr * forward_panel + column / unit * nr,
                                   forward_panel);
  kernels.pack_b_cols[kSourceBF16](
      piece, columns, columns, rows,
      reinterpret_cast<uint32_t*>(backward) + column / nr * backward_panel + row / unit * nr, backward_panel);
}

template <Isa kIsa>
const WeightPacking* packing_of() {
  const ProductKernels& kernels = kernels_of<kIsa>();
  if (kernels.unit == 1) return nullptr;
  static const WeightPacking packing{.rows = kernels.nr,
                                     .forward_bytes = forward_bytes<kIsa>,
                                     .backward_bytes = backward_bytes<kIsa>,
                                     .pack = pack<kIsa>};
  return &packing;
}

}  // namespace

PackedPanels packed_panels(const ProductKernels& kernels, int64_t columns, int64_t reduction) {
  const int64_t words = (reduction + kernels.unit - 1) / kernels.unit, panel = words * kernels.nr + kPanelGap;
  return {panel, (columns + kernels.nr - 1) / kernels.nr * panel};
}

const WeightPacking* weight_packing(Isa isa) {
  if (isa == Isa::kAmxBf16) return packing_of<Isa::kAmxBf16>();
  if (isa == Isa::kAvx512Bf16) return packing_of<Isa::kAvx512Bf16>();
  return nullptr;
}

}  // namespace concerto::cpu
