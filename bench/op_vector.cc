// Rates of the cpu backend's vector kernels beside their limits: JSON lines, one an op. `of_limit` is the share of what
// the same run measured: for ops that stream memory the rate of a read-modify-write stream as an optimizer makes it
// (bytes that must move over time), for attention the best rate of a dense product (causal work only: 4 D flops a
// visible pair forward, 10 D backward).
//
// `--clock cpu` takes the process's processor time instead of the wall's: with one thread, a fair figure on a machine
// that others use too.
//
//   bench_op_vector [--threads N] [--clock wall|cpu] [--seconds S] [--type bf16|f32] [--isa NAME] [--only PREFIX]
//                   [--seq S] [--dim D]
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <string>
#include <vector>

#include "concerto/ops/cpu/own_products.h"
#include "concerto/ops/cpu/vector/vector_kernels.h"

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
  std::string only;
  int64_t seq = 1024, dim = 64;
};

struct Bench {
  Options o;
  ThreadPool pool{o.threads};
  Arena scratch{int64_t{1} << 30};
  Backend backend;
  Context ctx;
  std::deque<Buffer> owners;
  double stream = 0, peak = 0;

  explicit Bench(const Options& options) : o(options) {
    backend.name = "cpu";
    backend.f32 = backend.bf16 = true;
    cpu::fill_vector_kernels(backend, o.isa);
    backend.linear = cpu::own_linear_kernels(o.isa);
    ctx.backend = &backend;
    ctx.pool = &pool;
    ctx.scratch = &scratch;
  }

  View tensor(Shape shape, DType type) {
    owners.emplace_back(shape.elements() * dtype_bytes(type));
    View v(owners.back().data(), shape, type);
    for (int64_t i = 0; i < v.elements(); ++i) {
      const float x = static_cast<float>((i * 7919) % 257 - 128) / 128;
      if (type == DType::kBF16) v.as<bf16>()[i] = bf16(x);
      if (type == DType::kF32) v.as<float>()[i] = x;
    }
    return v;
  }
  View ids(Shape shape, int64_t bound) {
    View v = tensor(shape, DType::kI32);
    for (int64_t i = 0; i < v.elements(); ++i) v.as<int32_t>()[i] = static_cast<int32_t>(i * 7919 % bound);
    return v;
  }
  View compute(Shape shape) { return tensor(shape, o.type); }
  View stat(Shape shape) { return tensor(shape, DType::kF32); }

  double stream_rate() {
    const int64_t n = 16 << 20;
    float *w = stat({n}).as<float>(), *m = stat({n}).as<float>(), *v = stat({n}).as<float>(),
          *g = stat({n}).as<float>();
    const double t = best_time(o.seconds * 2, [&] {
      pool.parallel_for(n, 4096, [&](int64_t begin, int64_t end, int) {
#pragma GCC ivdep
        for (int64_t i = begin; i < end; ++i) {
          m[i] = 0.9f * m[i] + 0.1f * g[i];
          v[i] = 0.95f * v[i] + 0.05f * g[i] * g[i];
          w[i] = w[i] * 0.999f - 1e-4f * m[i];
        }
      });
    });
    owners.clear();
    return 28.0 * static_cast<double>(n) / t;
  }

  // The best rate of a dense product.
  double product_rate() {
    double best = 0;
    for (const int64_t n : {512, 2048}) {
      const View x = compute({n, n}), w = compute({n, n}), y = compute({n, n});
      const double t = best_time(o.seconds, [&] { linear_forward(ctx, {.x = x, .w = w, .bias = {}, .y = y}); });
      best = std::max(best, 2.0 * static_cast<double>(n * n * n) / t);
      owners.clear();
    }
    return best;
  }

  bool wanted(const char* op) const { return std::string(op).compare(0, o.only.size(), o.only) == 0; }

  template <class F>
  void report(const char* op, const char* unit, double amount, double limit, F&& f) {
    if (!wanted(op)) return;
    const double t = best_time(o.seconds, f);
    std::printf(
        "{\"op\": \"%s\", \"isa\": \"%s\", \"type\": \"%s\", \"threads\": %d, \"seconds\": %.3g, \"%s\": %.4g, "
        "\"limit\": %.4g, \"of_limit\": %.3f}\n",
        op, cpu::isa_name(o.isa), std::string(dtype_name(o.type)).c_str(), pool.size(), t, unit, amount / t, limit,
        amount / t / limit);
    std::fflush(stdout);
  }
  // What must be read and written, from the views that are.
  template <class F>
  void streams(const char* op, std::initializer_list<View> moved, F&& f) {
    double bytes = 0;
    for (const View& v : moved) bytes += static_cast<double>(v.bytes());
    report(op, "bytes_per_s", bytes, stream, f);
  }

  void norm_and_friends() {
    const int64_t rows = 32768, hidden = 512, vocab = 32000;
    const View x = compute({rows, hidden}), y = compute({rows, hidden}), z = compute({rows, hidden}),
               w = stat({hidden}), rstd = stat({rows}), dw = stat({hidden}), wide = stat({rows, hidden});
    streams("rms_norm_forward", {x, y},
            [&] { rms_norm_forward(ctx, {.x = x, .w = w, .eps = 1e-5, .y = y, .rstd = rstd}); });
    streams("rms_norm_backward_input", {x, y, z},
            [&] { rms_norm_backward_input(ctx, {.dy = y, .x = x, .w = w, .rstd = rstd, .residual = {}, .dx = z}); });
    streams("rms_norm_backward_weight", {x, y},
            [&] { rms_norm_backward_weight(ctx, {.dy = y, .x = x, .rstd = rstd, .dw = dw}); });
    const View table = stat({1024, 64}), positions = ids({rows}, 1024);
    rope_fill_table(table, 10000);
    streams("rope", {x, x}, [&] { rope_apply(ctx, {.x = x, .positions = positions, .cos_sin = table}); });
    streams("add", {x, y, z}, [&] { add(ctx, {.a = x, .b = y, .out = z}); });
    streams("cast", {x, wide}, [&] { cast(ctx, {.in = wide, .out = x}); });
    const View half = x.cols_range(0, hidden / 2);
    const View act = compute({rows, hidden / 2});
    streams("swiglu_forward", {x, act}, [&] { swiglu_forward(ctx, {.gate_up = x, .act = act}); });
    streams("swiglu_backward", {x, half, y}, [&] { swiglu_backward(ctx, {.gate_up = x, .dact = act, .dgate_up = y}); });
    const View tokens = ids({rows}, vocab), dtable = stat({vocab, hidden});
    streams("embedding_backward_weight", {x, wide, wide},
            [&] { embedding_backward_weight(ctx, {.ids = tokens, .dy = x, .skip_id = -1, .dtable = dtable}); });
    owners.clear();
  }

  void loss() {
    const int64_t rows = 512, vocab = 32000;
    const View logits = stat({rows, vocab}), dlogits = compute({rows, vocab}), targets = ids({rows}, vocab),
               sum = tensor({1}, DType::kF64);
    streams("cross_entropy", {logits, dlogits}, [&] {
      cross_entropy(
          ctx,
          {.logits = logits, .targets = targets, .scale = 1, .loss_sum = sum, .dlogits = dlogits, .token_loss = {}});
    });
    owners.clear();
  }

  void experts() {
    const int64_t tokens = 8192, k = 6, experts = 64, hidden = 512;
    const View x = compute({tokens, hidden}), y = compute({tokens, hidden}), rows = compute({tokens * k, hidden});
    const View logits = stat({tokens, experts}), probs = stat({tokens, experts}), bias = stat({experts}),
               weights = stat({tokens, k}), dweights = stat({tokens, k});
    const View chosen = ids({tokens, k}, experts), row_of = ids({tokens, k}, 1), row_token = ids({tokens * k}, 1),
               offsets = ids({experts + 1}, 1);
    const View counts = tensor({experts}, DType::kI64), bare = tensor({experts}, DType::kI64),
               sums = tensor({experts}, DType::kF64);
    streams("router_select", {logits, probs}, [&] {
      router_select(ctx, {.logits = logits,
                          .bias = bias,
                          .probs = probs,
                          .expert_ids = chosen,
                          .weights = weights,
                          .counts = counts,
                          .bare_counts = bare,
                          .prob_sums = sums});
    });
    streams("router_select_backward", {logits, probs}, [&] {
      router_select_backward(
          ctx, {.dweights = dweights, .aux_dprob = {}, .probs = probs, .expert_ids = chosen, .dlogits = logits});
    });
    for (int64_t i = 0; i < tokens * k; ++i) chosen.as<int32_t>()[i] = static_cast<int32_t>(i * 7919 % 1013 % experts);
    const auto plan = [&] {
      make_dispatch_plan(ctx, {.expert_ids = chosen, .offsets = offsets, .row_token = row_token, .row_of = row_of});
    };
    plan();
    streams("make_dispatch_plan", {chosen, row_token, row_of}, plan);
    streams("gather_rows", {rows, x}, [&] { gather_rows(ctx, {.x = x, .row_token = row_token, .rows = rows}); });
    streams("gather_rows_backward", {rows, x},
            [&] { gather_rows_backward(ctx, {.drows = rows, .row_of = row_of, .dx = x}); });
    streams("combine_rows", {rows, x, x, y},
            [&] { combine_rows(ctx, {.rows = rows, .row_of = row_of, .add = x, .residual = x, .y = y}); });
    owners.clear();
  }

  void optimizer() {
    const int64_t n = 8 << 20;
    const View w = stat({n}), m = stat({n}), v = stat({n}), g = stat({n}), copy = compute({n}),
               sum = tensor({1}, DType::kF64);
    for (int64_t i = 0; i < n; ++i) v.as<float>()[i] = std::abs(v.as<float>()[i]);
    const AdamStep step{
        .w = w, .m = m, .v = v, .grad = g, .copy = copy, .lr = 1e-4, .weight_decay = 0.1, .c1 = 0.5, .c2 = 0.5};
    streams("adamw", {w, w, m, m, v, v, g, copy}, [&] { adamw_step(ctx, step); });
    streams("lamb", {w, w, m, m, v, v, g, copy, w, m, v}, [&] { lamb_step(ctx, step); });
    const RoundingKey key = rounding_key(1, 1, 1);
    AdamStep narrow = step;
    narrow.m = tensor({n}, DType::kBF16);
    narrow.v = tensor({n}, DType::kBF16);
    for (int64_t i = 0; i < n; ++i) narrow.v.as<bf16>()[i].bits &= 0x7fff;
    narrow.rounding = {.keys = &key, .ends = &n, .count = 1};
    const View &nm = narrow.m, &nv = narrow.v;
    streams("adamw_bf16_moments", {w, w, nm, nm, nv, nv, g, copy}, [&] { adamw_step(ctx, narrow); });
    streams("lamb_bf16_moments", {w, w, nm, nm, nv, nv, g, copy, w, nm, nv}, [&] { lamb_step(ctx, narrow); });
    streams("sum_squares", {g}, [&] { sum_squares(ctx, {.x = g, .out = sum}); });
    owners.clear();
  }

  void attention() {
    const int64_t seq = o.seq, docs = std::max<int64_t>(1, 8192 / seq), heads = 8, kv_heads = 4, dim = o.dim,
                  tokens = seq * docs;
    const View q = compute({tokens, heads * dim}), k = compute({tokens, kv_heads * dim}),
               v = compute({tokens, kv_heads * dim}), out = compute({tokens, heads * dim}),
               dout = compute({tokens, heads * dim}), dq = compute({tokens, heads * dim}),
               dk = compute({tokens, kv_heads * dim}), dv = compute({tokens, kv_heads * dim}),
               lse = stat({tokens, heads});
    const View offsets = tensor({docs + 1}, DType::kI32);
    for (int64_t i = 0; i <= docs; ++i) offsets.as<int32_t>()[i] = static_cast<int32_t>(i * seq);
    const double scale = 1 / std::sqrt(static_cast<double>(dim));
    const double pairs =
        static_cast<double>(docs * heads) * static_cast<double>(seq) * static_cast<double>(seq + 1) / 2;
    report("attention_forward", "flops_per_s", 4.0 * static_cast<double>(dim) * pairs, peak, [&] {
      attention_forward(ctx, {.q = q,
                              .k = k,
                              .v = v,
                              .doc_offsets = offsets,
                              .num_heads = heads,
                              .num_kv_heads = kv_heads,
                              .head_dim = dim,
                              .scale = scale,
                              .out = out,
                              .lse = lse});
    });
    report("attention_backward", "flops_per_s", 10.0 * static_cast<double>(dim) * pairs, peak, [&] {
      attention_backward(ctx, {.dout = dout,
                               .q = q,
                               .k = k,
                               .v = v,
                               .out = out,
                               .lse = lse,
                               .doc_offsets = offsets,
                               .num_heads = heads,
                               .num_kv_heads = kv_heads,
                               .head_dim = dim,
                               .scale = scale,
                               .dq = dq,
                               .dk = dk,
                               .dv = dv});
    });
    const View one = q.rows_range(0, 1), one_out = out.rows_range(0, 1);
    streams("attention_cached", {k, v}, [&] {
      attention_cached(ctx, {.q = one,
                             .k_cache = k,
                             .v_cache = v,
                             .past = tokens - 1,
                             .num_heads = heads,
                             .num_kv_heads = kv_heads,
                             .head_dim = dim,
                             .scale = scale,
                             .out = one_out});
    });
    owners.clear();
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
    if (key == "--only") o.only = value;
    if (key == "--seq") o.seq = std::atoll(value.c_str());
    if (key == "--dim") o.dim = std::atoll(value.c_str());
  }
  Bench bench(o);
  bench.stream = bench.stream_rate();
  bench.peak = bench.product_rate();
  bench.norm_and_friends();
  bench.loss();
  bench.experts();
  bench.optimizer();
  bench.attention();
  return 0;
}
