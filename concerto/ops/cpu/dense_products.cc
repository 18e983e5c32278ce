#include "concerto/ops/cpu/dense_products.h"

#include <cstdlib>

#include "concerto/base/error.h"
#include "concerto/ops/cpu/onednn_linear.h"
#include "concerto/ops/cpu/own_products.h"

namespace concerto::cpu {
namespace {

struct Dense {
  LinearKernels f32, bf16;
  const LinearKernels& of(DType type) const { return type == DType::kBF16 ? bf16 : f32; }
};

const Dense& dense() {
  static const Dense chosen = [] {
    const char* wish = std::getenv("CONCERTO_DENSE");
    const Isa isa = active_isa();
    const DenseChoice choice = choose_dense(wish ? wish : "", isa, onednn_built());
    const LinearKernels own = own_linear_kernels(isa);
    return Dense{choice.onednn_f32 ? onednn_linear_kernels() : own, choice.onednn_bf16 ? onednn_linear_kernels() : own};
  }();
  return chosen;
}

}  // namespace

DenseChoice choose_dense(std::string_view wish, Isa isa, bool onednn_built) {
  if (wish.empty() || wish == "own") return {};
  if (wish == "onednn") {
    if (!onednn_built)
      throw Error(ErrorCode::kUnsupported, "CONCERTO_DENSE", "oneDNN is not in this build",
                  "Configure with -DCONCERTO_ONEDNN=ON (Debian: libdnnl-dev), or unset CONCERTO_DENSE.");
    return {.onednn_f32 = true, .onednn_bf16 = isa >= Isa::kAvx512Bf16};
  }
  throw Error(ErrorCode::kUnsupported, "CONCERTO_DENSE", fmt::format("'{}' is no dense product", wish),
              "Use own or onednn, or unset it.");
}

LinearKernels dense_kernels() {
  dense();  // settings are judged at start, not in the first product
  return {
      .forward = [](const Context& ctx, const LinearForward& a) { dense().of(a.x.dtype).forward(ctx, a); },
      .backward_input = [](const Context& ctx,
                           const LinearBackwardInput& a) { dense().of(a.dy.dtype).backward_input(ctx, a); },
      .backward_weight = [](const Context& ctx,
                            const LinearBackwardWeight& a) { dense().of(a.x.dtype).backward_weight(ctx, a); },
      .packing = dense().bf16.packing,
  };
}

}  // namespace concerto::cpu
