#include "concerto/ops/cpu/vector/vector_kernels.h"

#include "concerto/ops/cpu/vector/drivers.h"

namespace concerto::cpu {

// What the isa_*.cc define in the namespace of each instruction set.
namespace vector_generic {
extern const RowTable kRows[2];
extern const SoftmaxTable kSoftmax;
extern const OptimizerTable kOptimizer[4];
extern const AttentionTable kAttention[2];
}  // namespace vector_generic
namespace vector_avx2 {
extern const RowTable kRows[2];
extern const SoftmaxTable kSoftmax;
extern const OptimizerTable kOptimizer[4];
extern const AttentionTable kAttention[2];
}  // namespace vector_avx2
namespace vector_avx512 {
extern const RowTable kRows[2];
extern const SoftmaxTable kSoftmax;
extern const OptimizerTable kOptimizer[4];
extern const AttentionTable kAttention[2];
}  // namespace vector_avx512
namespace vector_avx512_bf16 {
extern const RowTable kRows[2];
extern const SoftmaxTable kSoftmax;
extern const OptimizerTable kOptimizer[4];
extern const AttentionTable kAttention[2];
}  // namespace vector_avx512_bf16

const KernelTable& kernel_table(Isa isa) {
  static const KernelTable tables[] = {
      {vector_generic::kRows, &vector_generic::kSoftmax, vector_generic::kOptimizer, vector_generic::kAttention},
      {vector_avx2::kRows, &vector_avx2::kSoftmax, vector_avx2::kOptimizer, vector_avx2::kAttention},
      {vector_avx512::kRows, &vector_avx512::kSoftmax, vector_avx512::kOptimizer, vector_avx512::kAttention},
      {vector_avx512_bf16::kRows, &vector_avx512_bf16::kSoftmax, vector_avx512_bf16::kOptimizer,
       vector_avx512_bf16::kAttention},
  };
  return tables[static_cast<int>(isa == Isa::kAmxBf16 ? Isa::kAvx512Bf16 : isa)];  // tiles are for products
}

void fill_vector_kernels(Backend& backend, Isa isa) {
  fill_norm(backend, isa);
  fill_rope(backend, isa);
  fill_swiglu(backend, isa);
  fill_elementwise(backend, isa);
  fill_embedding(backend, isa);
  fill_permute(backend, isa);
  fill_cross_entropy(backend, isa);
  fill_router(backend, isa);
  fill_routing(backend, isa);
  fill_optimizer(backend, isa);
  fill_attention(backend, isa);
}

}  // namespace concerto::cpu
