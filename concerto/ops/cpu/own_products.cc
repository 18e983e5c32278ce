#include "concerto/ops/cpu/own_products.h"

#include "concerto/ops/cpu/product.h"
#include "concerto/ops/cpu/weight_packing.h"

namespace concerto::cpu {
namespace {

const float* floats_or_null(const View& v) { return v ? v.as<float>() : nullptr; }
const int32_t* ints_or_null(const View& v) { return v ? v.as<const int32_t>() : nullptr; }

template <Isa kIsa>
void linear_forward(const Context& ctx, const LinearForward& a) {
  row_product(ctx, kIsa,
              {.a = a.x,
               .b = a.w.data,
               .packed = a.packed.forward,
               .b_type = a.w.dtype,
               .n = a.w.dim(0),
               .bias = floats_or_null(a.bias),
               .out = a.y});
}

template <Isa kIsa>
void linear_backward_input(const Context& ctx, const LinearBackwardInput& a) {
  row_product(ctx, kIsa,
              {.a = a.dy,
               .b = a.w.data,
               .packed = a.packed.backward,
               .b_type = a.w.dtype,
               .reduce_rows = true,
               .n = a.w.dim(1),
               .out = a.dx,
               .accumulate = a.accumulate});
}

template <Isa kIsa>
void linear_backward_weight(const Context& ctx, const LinearBackwardWeight& a) {
  weight_product(ctx, kIsa,
                 {.a = a.dy, .b = a.x, .rows = a.x.rows(), .out = a.dw.as<float>(), .accumulate = a.accumulate});
  if (a.db) add_column_sums(ctx, kIsa, a.bias_dy ? a.bias_dy : a.dy, a.db.as<float>());
}

template <Isa kIsa>
void grouped_forward(const Context& ctx, const GroupedLinearForward& a) {
  row_product(ctx, kIsa,
              {.a = a.x,
               .gathers = static_cast<bool>(a.row_token),
               .a_row = ints_or_null(a.row_token),
               .b = a.w.data,
               .packed = a.packed.forward,
               .b_type = a.w.dtype,
               .n = a.w.dim(1),
               .offsets = ints_or_null(a.offsets),
               .groups = a.w.dim(0),
               .out = a.y});
}

template <Isa kIsa>
void grouped_backward_input(const Context& ctx, const GroupedLinearBackwardInput& a) {
  row_product(ctx, kIsa,
              {.a = a.dy,
               .gathers = static_cast<bool>(a.row_token),
               .a_row = ints_or_null(a.row_token),
               .b = a.w.data,
               .packed = a.packed.backward,
               .b_type = a.w.dtype,
               .reduce_rows = true,
               .n = a.w.dim(2),
               .offsets = ints_or_null(a.offsets),
               .groups = a.w.dim(0),
               .out = a.dx});
}

template <Isa kIsa>
void grouped_backward_weight(const Context& ctx, const GroupedLinearBackwardWeight& a) {
  weight_product(ctx, kIsa,
                 {.a = a.dy,
                  .b = a.x,
                  .gathers = a.x_row_token || a.dy_row_token,
                  .a_row = ints_or_null(a.dy_row_token),
                  .b_row = ints_or_null(a.x_row_token),
                  .rows = a.x_row_token ? a.x_row_token.dim(0) : a.x.dim(0),
                  .offsets = ints_or_null(a.offsets),
                  .groups = a.dw.dim(0),
                  .out = a.dw.as<float>(),
                  .accumulate = a.accumulate});
}

template <Isa kIsa>
void router_logits_product(const Context& ctx, const RouterLogits& a) {
  row_product(ctx, kIsa, {.a = a.x, .b = a.w.data, .b_type = a.w.dtype, .n = a.w.dim(0), .out = a.logits});
}

template <Isa kIsa>
void router_logits_product_backward_input(const Context& ctx, const RouterLogitsBackwardInput& a) {
  row_product(ctx, kIsa,
              {.a = a.dlogits,
               .b = a.w.data,
               .b_type = a.w.dtype,
               .reduce_rows = true,
               .n = a.w.dim(1),
               .out = a.dx,
               .accumulate = true});
}

template <Isa kIsa>
void router_logits_product_backward_weight(const Context& ctx, const RouterLogitsBackwardWeight& a) {
  weight_product(ctx, kIsa, {.a = a.dlogits, .b = a.x, .rows = a.x.rows(), .out = a.dw.as<float>()});
}

struct Tables {
  LinearKernels linear;
  GroupedLinearKernels grouped;
  RouterKernels router;
};

template <Isa kIsa>
Tables tables_of() {
  Tables t;
  t.linear = {linear_forward<kIsa>, linear_backward_input<kIsa>, linear_backward_weight<kIsa>, weight_packing(kIsa)};
  t.grouped = {grouped_forward<kIsa>, grouped_backward_input<kIsa>, grouped_backward_weight<kIsa>,
               weight_packing(kIsa)};
  t.router.logits = router_logits_product<kIsa>;
  t.router.logits_backward_input = router_logits_product_backward_input<kIsa>;
  t.router.logits_backward_weight = router_logits_product_backward_weight<kIsa>;
  return t;
}

Tables tables(Isa isa) {
  switch (isa) {
    case Isa::kAmxBf16:
      return tables_of<Isa::kAmxBf16>();
    case Isa::kAvx512Bf16:
      return tables_of<Isa::kAvx512Bf16>();
    case Isa::kAvx512:
      return tables_of<Isa::kAvx512>();
    case Isa::kAvx2:
      return tables_of<Isa::kAvx2>();
    case Isa::kGeneric:
      break;
  }
  return tables_of<Isa::kGeneric>();
}

}  // namespace

LinearKernels own_linear_kernels(Isa isa) { return tables(isa).linear; }
GroupedLinearKernels grouped_linear_kernels(Isa isa) { return tables(isa).grouped; }

void fill_router_products(RouterKernels& router, Isa isa) {
  const RouterKernels from = tables(isa).router;
  router.logits = from.logits;
  router.logits_backward_input = from.logits_backward_input;
  router.logits_backward_weight = from.logits_backward_weight;
}

}  // namespace concerto::cpu
