// Who brings the threads to oneDNN? Rates of one dense product, best of repeats, JSON lines:
//   team             oneDNN with libgomp's team on all processors, nothing else running
//   team_after_pool  the same, each product after a call on our pool, as in a training step
//   pool             our pool's threads each call oneDNN single-threaded on a slice of rows
//   own              our own kernels on our pool
// Behind docs/decisions/0005-onednn-single-threaded.md.
//
//   bench_onednn_threads [seconds a figure]
#include <omp.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <dnnl.hpp>
#include <thread>
#include <unordered_map>

#include "concerto/ops/cpu/onednn_linear.h"
#include "concerto/ops/cpu/own_products.h"

using namespace concerto;
using dnnl::memory;

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// The oneDNN product with OpenMP's team; made and run on one thread, whose OpenMP settings nobody else has touched.
struct TeamProduct {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  dnnl::matmul matmul;
  std::unordered_map<int, memory> args;

  TeamProduct(int64_t m, int64_t n, int64_t k, memory::data_type type) {
    const memory::desc a({m, k}, type, memory::dims{k, 1}), b({k, n}, type, memory::dims{1, k}),
        c({m, n}, type, memory::dims{n, 1});
    matmul = dnnl::matmul(dnnl::matmul::primitive_desc(dnnl::matmul::desc(a, b, c), engine));
    args = {
        {DNNL_ARG_SRC, memory(a, engine)}, {DNNL_ARG_WEIGHTS, memory(b, engine)}, {DNNL_ARG_DST, memory(c, engine)}};
    for (auto& [_, m] : args) std::memset(m.get_data_handle(), 0, m.get_desc().get_size());
  }
  void run() {
    matmul.execute(stream, args);
    stream.wait();
  }
};

// Best time of `timed` within `seconds`, with `before` run before each and not counted.
template <class Before, class Timed>
double best_time(double seconds, Before before, Timed timed) {
  double best = 1e30;
  const double until = now() + seconds;
  for (int i = 0; i < 5 || now() < until; ++i) {
    before();
    const double t = now();
    timed();
    best = std::min(best, now() - t);
  }
  return best;
}

void print(const char* who, DType type, int threads, const std::array<int64_t, 3>& s, double seconds) {
  const double flops = 2.0 * static_cast<double>(s[0]) * static_cast<double>(s[1]) * static_cast<double>(s[2]);
  fmt::print(
      R"({{"who": "{}", "type": "{}", "threads": {}, "shape": "{},{},{}", "seconds": {:.4g}, "flops_per_s": {:.4g}}})"
      "\n",
      who, dtype_name(type), threads, s[0], s[1], s[2], seconds, flops / seconds);
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 1;
  ThreadPool pool;
  Arena scratch(256 << 20);
  Backend own, onednn;
  own.linear = cpu::own_linear_kernels(cpu::active_isa());
  onednn.linear = cpu::onednn_linear_kernels();
  Context ctx;
  ctx.pool = &pool;
  ctx.scratch = &scratch;
  for (const DType type : {DType::kBF16, DType::kF32}) {
    if (type == DType::kBF16 && cpu::detected_isa() < cpu::Isa::kAvx512Bf16) continue;
    for (const auto& s :
         {std::array<int64_t, 3>{192, 512, 512}, {768, 512, 512}, {2048, 1536, 512}, {8192, 512, 512}}) {
      const auto [m, n, k] = s;
      omp_set_num_threads(pool.size());
      TeamProduct team(m, n, k, type == DType::kBF16 ? memory::data_type::bf16 : memory::data_type::f32);
      print("team", type, pool.size(), s,
            best_time(
                seconds, [] {}, [&] { team.run(); }));
      const auto pool_call = [&] { pool.run([](int) {}); };
      print("team_after_pool", type, pool.size(), s, best_time(seconds, pool_call, [&] { team.run(); }));

      Buffer memory((m * k + n * k + m * n) * dtype_bytes(type));
      const auto at = [&](int64_t element) { return memory.data() + element * dtype_bytes(type); };
      const LinearForward args{.x = View(at(0), {m, k}, type),
                               .w = View(at(m * k), {n, k}, type),
                               .bias = {},
                               .y = View(at(m * k + n * k), {m, n}, type)};
      // On a thread of its own: oneDNN's single-threaded calls change the OpenMP setting of the thread that makes them.
      std::thread([&] {
        for (const auto& [who, backend] : {std::pair<const char*, const Backend*>{"pool", &onednn}, {"own", &own}}) {
          ctx.backend = backend;
          linear_forward(ctx, args);
          print(who, type, pool.size(), s,
                best_time(
                    seconds, [] {}, [&] { linear_forward(ctx, args); }));
        }
      }).join();
    }
  }
  return 0;
}
