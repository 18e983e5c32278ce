#include "concerto/ops/cpu/cpu_backend.h"

#include "concerto/ops/cpu/dense_products.h"
#include "concerto/ops/cpu/own_products.h"
#include "concerto/ops/cpu/vector/vector_kernels.h"

namespace concerto {
namespace {

Backend make_backend() {
  const cpu::Isa isa = cpu::active_isa();
  Backend b;
  b.name = "cpu";
  b.f32 = b.bf16 = true;
  cpu::fill_vector_kernels(b, isa);
  b.linear = cpu::dense_kernels();
  b.grouped_linear = cpu::grouped_linear_kernels(isa);
  cpu::fill_router_products(b.router, isa);
  return b;
}

}  // namespace

const Backend& cpu_backend() {
  static const Backend backend = make_backend();
  return backend;
}

}  // namespace concerto
