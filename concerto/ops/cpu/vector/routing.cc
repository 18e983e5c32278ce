#include "concerto/ops/cpu/vector/drivers.h"
#include "concerto/ops/routing_kernels.h"

namespace concerto::cpu {
namespace {

template <Isa isa>
struct VectorRows {
  using S = float;
  static const SoftmaxTable& table() { return *kernel_table(isa).softmax; }

  static void softmax(const float* z, float* p, int64_t n) { table().softmax(z, p, n); }
  static void softmax_backward(const float* p, const float* dp, float* dz, int64_t n) {
    table().softmax_backward(p, dp, dz, n);
  }
  static double log_sum_exp(const float* z, int64_t n) { return table().log_sum_exp(z, n); }
  static void sigmoid(const float* z, float* p, int64_t n) {
    for (int64_t e = 0; e < n; ++e) p[e] = -z[e];
    table().exp(p, p, n);
    for (int64_t e = 0; e < n; ++e) p[e] = 1 / (1 + p[e]);
  }
  static void top_k(float* s, int64_t n, int64_t k, int32_t* ids) { table().top_k(s, n, k, ids); }
};

template <Isa isa>
struct Routing {
  static void fill(Backend& b) { b.routing = routing::kernels<VectorRows<isa>>(); }
};

}  // namespace

void fill_routing(Backend& backend, Isa isa) { fill_for<Routing>(backend, isa); }

}  // namespace concerto::cpu
