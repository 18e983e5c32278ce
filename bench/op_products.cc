// Rates of the cpu backend's products beside their limit: JSON lines, one a (op, shape). `peak` is the best rate that a
// register tile on data in the first cache level reached on all threads in this same run; `of_peak` is the ratio. With
// oneDNN in the build its own products are measured too (rival).
//
// `--clock cpu` takes the process's processor time instead of the wall's: with one thread, a fair figure on a machine
// that others use too.
//
//   bench_op_products [--threads N] [--clock wall|cpu] [--seconds S] [--type bf16|f32] [--isa NAME]
//                     [--shape m,n,k]... [--grouped rows,experts,n,k[,zipf]]... [--op NAME]
#include <time.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "concerto/ops/cpu/onednn_linear.h"
#include "concerto/ops/cpu/own_products.h"
#include "concerto/ops/cpu/product_kernels.h"

using namespace concerto;

namespace {

bool cpu_clock = false;

double now() {
  if (cpu_clock) {
    timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Best of repeats within `seconds`, at least three.
template <class F>
double best_time(double seconds, F&& f) {
  f();
  double best = 1e30;
  const double until = now() + seconds;
  for (int i = 0; i < 3 || now() < until; ++i) {
    const double t = now();
    f();
    best = std::min(best, now() - t);
  }
  return best;
}

struct Options {
  int threads = 0;
  double seconds = 0.3;
  DType type = DType::kBF16;
  cpu::Isa isa = cpu::active_isa();
  std::vector<std::array<int64_t, 3>> shapes;
  struct Grouped {
    int64_t rows, experts, n, k;
    bool zipf;
  };
  std::vector<Grouped> grouped;
  std::string op;  // only this one
};

struct Bench {
  Options o;
  ThreadPool pool{o.threads};
  Arena scratch{256 << 20};
  Backend backend, onednn;
  Context ctx;
  double peak = 0;

  explicit Bench(const Options& options) : o(options) {
    backend.name = "cpu";
    backend.f32 = backend.bf16 = true;
    backend.linear = cpu::own_linear_kernels(o.isa);
    backend.grouped_linear = cpu::grouped_linear_kernels(o.isa);
    cpu::fill_router_products(backend.router, o.isa);
    if (has_rival()) onednn.linear = cpu::onednn_linear_kernels();
    ctx.backend = &backend;
    ctx.pool = &pool;
    ctx.scratch = &scratch;
    peak = tile_peak();
  }

  bool has_rival() const {
    return cpu::onednn_built() && (o.type == DType::kF32 || cpu::detected_isa() >= cpu::Isa::kAvx512Bf16);
  }

  // One panel of B and a few rows of A, over and over.
  double tile_peak() {
    const cpu::ProductKernels& k = cpu::product_kernels(o.isa, o.type == DType::kBF16);
    const int64_t words = 128, rows = k.mr * 4, repeats = 2000;
    Buffer memory(int64_t{pool.size()} << 20);
    const double t = best_time(o.seconds * 2, [&] {
      pool.run([&](int thread) {
        auto* a = reinterpret_cast<uint32_t*>(memory.data() + (int64_t{thread} << 20));
        for (int64_t i = 0; i < repeats; ++i)
          k.tile(a, k.mr * words, a + (1 << 16), words * k.nr, reinterpret_cast<float*>(a + (1 << 17)), k.nr, rows, 1,
                 words, true, cpu::Finish::kKeep, nullptr, 0, nullptr);
      });
    });
    return 2.0 * static_cast<double>(rows * k.nr * words * k.unit * repeats * pool.size()) / t;
  }

  View tensor(Buffer& owner, Shape shape, DType type) {
    owner = Buffer(shape.elements() * dtype_bytes(type));
    View v(owner.data(), shape, type);
    for (int64_t i = 0; i < v.elements(); ++i) {
      const float x = static_cast<float>((i * 7919) % 257 - 128) / 256;
      if (type == DType::kBF16)
        v.as<bf16>()[i] = bf16(x);
      else
        v.as<float>()[i] = x;
    }
    return v;
  }

  // Packed as a store keeps it for this backend; null where it does not.
  PackedWeight pack(const WeightPacking* packing, View w, int64_t groups, Buffer& memory) {
    if (!packing || o.type != DType::kBF16) return {};
    const int64_t k = w.cols(), n = w.rows() / groups, forward = align_up(packed_forward_bytes(*packing, groups, n, k));
    memory = Buffer(forward + packed_backward_bytes(*packing, groups, n, k));
    const PackedWeight p{packing, groups, n, k, memory.data(), memory.data() + forward};
    pack_weight(ctx, {.from = w, .to = p});
    return p;
  }

  template <class F>
  void report(const char* op, const char* by, const std::string& shape, double flops, F&& f) {
    if (!o.op.empty() && o.op != op) return;
    const double t = best_time(o.seconds, f);
    fmt::print(
        R"({{"op": "{}", "by": "{}", "isa": "{}", "type": "{}", "threads": {}, "shape": "{}", "seconds": {:.3g}, )"
        R"("flops_per_s": {:.4g}, "peak": {:.4g}, "of_peak": {:.3f}}})"
        "\n",
        op, by, cpu::isa_name(o.isa), dtype_name(o.type), pool.size(), shape, t, flops / t, peak, flops / t / peak);
    std::fflush(stdout);
  }

  void linear(int64_t m, int64_t n, int64_t k) {
    Buffer memory[7];
    const View x = tensor(memory[0], {m, k}, o.type), w = tensor(memory[1], {n, k}, o.type);
    const View dy = tensor(memory[2], {m, n}, o.type), y = tensor(memory[3], {m, n}, o.type);
    const View dx = tensor(memory[4], {m, k}, o.type), dw = tensor(memory[5], {n, k}, DType::kF32);
    const double flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
    const std::string shape = fmt::format("{},{},{}", m, n, k);
    const PackedWeight own_packed = pack(backend.linear.packing, w, 1, memory[6]);
    for (const bool rival : {false, true}) {
      if (rival && !has_rival()) continue;
      const PackedWeight packed = rival ? PackedWeight{} : own_packed;
      Context c = ctx;
      if (rival) c.backend = &onednn;
      const char* by = rival ? "onednn" : "own";
      report("linear_forward", by, shape, flops,
             [&] { linear_forward(c, {.x = x, .w = w, .bias = {}, .y = y, .packed = packed}); });
      report("linear_backward_input", by, shape, flops,
             [&] { linear_backward_input(c, {.dy = dy, .w = w, .dx = dx, .packed = packed}); });
      report("linear_backward_weight", by, shape, flops,
             [&] { linear_backward_weight(c, {.x = x, .dy = dy, .dw = dw, .db = {}}); });
    }
  }

  // Rows of e experts: all equal, or as 1 / rank (Zipf).
  void grouped(int64_t rows, int64_t experts, int64_t n, int64_t k, bool zipf) {
    std::vector<int32_t> offsets(static_cast<size_t>(experts) + 1);
    double harmonic = 0;
    for (int64_t e = 1; e <= experts; ++e) harmonic += 1.0 / static_cast<double>(e);
    double sum = 0;
    for (int64_t e = 0; e < experts; ++e) {
      sum += zipf ? 1.0 / static_cast<double>(e + 1) / harmonic : 1.0 / static_cast<double>(experts);
      offsets[static_cast<size_t>(e) + 1] = static_cast<int32_t>(std::llround(sum * static_cast<double>(rows)));
    }
    Buffer memory[7];
    const View x = tensor(memory[0], {rows, k}, o.type), w = tensor(memory[1], {experts, n, k}, o.type);
    const View dy = tensor(memory[2], {rows, n}, o.type), y = tensor(memory[3], {rows, n}, o.type);
    const View dx = tensor(memory[4], {rows, k}, o.type);
    const View dw = tensor(memory[5], {experts, n, k}, DType::kF32), off(offsets.data(), {experts + 1}, DType::kI32);
    const double flops = 2.0 * static_cast<double>(rows) * static_cast<double>(n) * static_cast<double>(k);
    const std::string shape =
        fmt::format("{} rows, {} experts of {} x {}, {}", rows, experts, n, k, zipf ? "zipf" : "even");
    const PackedWeight packed = pack(backend.grouped_linear.packing, w, experts, memory[6]);
    report("grouped_forward", "own", shape, flops,
           [&] { grouped_linear_forward(ctx, {.x = x, .w = w, .offsets = off, .y = y, .packed = packed}); });
    report("grouped_backward_input", "own", shape, flops,
           [&] { grouped_linear_backward_input(ctx, {.dy = dy, .w = w, .offsets = off, .dx = dx, .packed = packed}); });
    for (const bool accumulate : {false, true})  // the first micro-batch of a step, and later ones
      report(accumulate ? "grouped_backward_weight_add" : "grouped_backward_weight", "own", shape, flops, [&] {
        grouped_linear_backward_weight(ctx, {.x = x, .dy = dy, .offsets = off, .dw = dw, .accumulate = accumulate});
      });
  }
};

}  // namespace

int main(int argc, char** argv) {
  Options o;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i], value = argv[i + 1];
    if (key == "--threads") o.threads = std::atoi(value.c_str());
    if (key == "--clock") cpu_clock = value == "cpu";
    if (key == "--seconds") o.seconds = std::atof(value.c_str());
    if (key == "--type") o.type = value == "f32" ? DType::kF32 : DType::kBF16;
    if (key == "--isa") o.isa = cpu::isa_from_cap(value, cpu::detected_isa());
    if (key == "--shape") {
      std::array<int64_t, 3> s{};
      if (std::sscanf(value.c_str(), "%ld,%ld,%ld", &s[0], &s[1], &s[2]) == 3) o.shapes.push_back(s);
    }
    if (key == "--op") o.op = value;
    if (key == "--grouped") {
      Options::Grouped g{};
      if (std::sscanf(value.c_str(), "%ld,%ld,%ld,%ld", &g.rows, &g.experts, &g.n, &g.k) == 4) {
        g.zipf = value.ends_with(",zipf");
        o.grouped.push_back(g);
      }
    }
  }
  Bench bench(o);
  for (const auto& s : o.shapes) bench.linear(s[0], s[1], s[2]);
  for (const auto& g : o.grouped) bench.grouped(g.rows, g.experts, g.n, g.k, g.zipf);
  if (!o.shapes.empty() || !o.grouped.empty()) return 0;
  for (const auto& s : {std::array<int64_t, 3>{2048, 2048, 2048},
                        {8192, 512, 512},
                        {8192, 1536, 512},
                        {8192, 512, 1536},
                        {1024, 8192, 512},
                        {768, 512, 512}})
    bench.linear(s[0], s[1], s[2]);
  for (const bool zipf : {false, true})
    for (const int64_t rows : {16384, 1536}) bench.grouped(rows, 64, 512, 512, zipf);
  return 0;
}
