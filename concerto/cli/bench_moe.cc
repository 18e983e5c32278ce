#include "concerto/cli/bench_moe.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "concerto/base/clock.h"
#include "concerto/base/rng.h"
#include "concerto/cli/backends.h"
#include "concerto/cli/option_checks.h"
#include "concerto/model/stage.h"
#include "concerto/ops/cpu/isa.h"
#include "concerto/ops/cpu/onednn_linear.h"
#include "concerto/ops/linear.h"
#include "concerto/train/expert_load.h"

namespace concerto {
namespace {

void set_element(View v, int64_t i, float x) {
  if (v.dtype == DType::kBF16)
    v.as<bf16>()[i] = bf16(x);
  else
    v.as<float>()[i] = x;
}

ModelConfig one_layer(const MoeCase& c) {
  ModelConfig m;
  m.hidden_size = c.hidden;
  m.moe_num_experts = c.experts;
  m.moe_k = c.top_k;
  m.moe_intermediate_size = c.width;
  m.moe_num_shared_experts = 0;
  m.moe_layer_start_index = 0;
  // What the layer does not use is as small as it can be.
  m.num_hidden_layers = m.num_attention_heads = m.num_key_value_heads = 1;
  m.vocab_size = 16;
  m.intermediate_size = m.head_dim = 2;
  return m;
}

// The layer with its memory; runs again and again on the same tokens.
class MoeLayer {
 public:
  MoeLayer(const MoeCase& c, const Backend& backend, ThreadPool& pool, uint64_t seed)
      : case_(c),
        config_(one_layer(c)),
        store_(tensor_specs(config_), c.dtype, StoreUse::kTrain, &backend),
        stage_(config_, store_, Recompute::kNone, 1) {
    store_.initialize(config_, Init::kHuggingFace, seed, pool);
    for (const Unit& u : stage_.units())
      if (u.name == "layers.0.mlp") unit_ = &u;
    CHECK(unit_, "the stage has no MoE unit");
    saved_.segments.resize(unit_->segments.size());
    make_inputs(seed);
    router_ = RouterMemory(config_, {.stat = store_.stat()});
    tokens_.count = c.tokens;
    tokens_.local = {0, c.tokens};
    ctx_.ops = {.backend = &backend, .pool = &pool, .scratch = &scratch_};
    ctx_.tokens = &tokens_;
    ctx_.losses = &losses_;
    ctx_.router = &router_.stats;
    ctx_.training = true;
    ctx_.ops.dry_run = true;
    run();
    ctx_.ops.dry_run = false;
    keep_ = Arena(keep_.high_water());
    backward_ = Arena(backward_.high_water());
    scratch_ = Arena(scratch_.high_water());
  }
  MoeLayer(const MoeLayer&) = delete;
  MoeLayer& operator=(const MoeLayer&) = delete;

  void run() {
    keep_.reset();
    backward_.reset();
    Acts acts, grads;
    acts.hidden = hidden_;
    unit_forward(*unit_, ctx_, acts, saved_, {&keep_, &backward_, &backward_});
    grads.hidden = gradient_;
    unit_backward_input(*unit_, ctx_, grads, saved_, {&keep_, &backward_, &backward_});
    store_.clear_gradients(*ctx_.ops.pool);
    unit_backward_weight(*unit_, ctx_, saved_);
  }
  void set_profile(OpProfile* profile) { ctx_.ops.profile = profile; }
  double max_over_mean() const {
    const auto* counts = router_.stats.counts.as<const int64_t>();
    return summarize_load({counts, static_cast<size_t>(case_.experts)}).max_over_mean;
  }

 private:
  // Router row e reads element e of a hidden row, and a token's chosen experts are the ones whose elements stand out.
  void make_inputs(uint64_t seed) {
    const int64_t h = case_.hidden, k = case_.top_k;
    std::vector<float> gate(static_cast<size_t>(case_.experts * h), 0.0f);
    for (int64_t e = 0; e < case_.experts; ++e) gate[static_cast<size_t>(e * h + e)] = 1.0f;
    store_.set(store_.find("model.layers.0.mlp.gate.weight"), gate.data());
    const Shape shape{case_.tokens, h};
    memory_ = Buffer(2 * shape.elements() * dtype_bytes(case_.dtype));
    hidden_ = View(memory_.data(), shape, case_.dtype);
    gradient_ = View(memory_.data() + shape.elements() * dtype_bytes(case_.dtype), shape, case_.dtype);
    const Rng rng(seed, "bench rows");
    const auto loads = expert_loads(case_.skew, case_.tokens, case_.experts, k);
    const auto chosen = chosen_experts(loads, case_.tokens, k, seed);
    for (int64_t t = 0; t < case_.tokens; ++t) {
      for (int64_t j = 0; j < h; ++j) {
        const auto noise = static_cast<float>(2 * rng.uniform(static_cast<uint64_t>(t * h + j)) - 1);
        set_element(hidden_, t * h + j, j < case_.experts ? 0.0f : noise);
        set_element(gradient_, t * h + j, 1e-3f * noise);
      }
      for (int64_t i = 0; i < k; ++i) set_element(hidden_, t * h + chosen[static_cast<size_t>(t * k + i)], 4.0f);
    }
  }

  MoeCase case_;
  ModelConfig config_;
  ParameterStore store_;
  Stage stage_;
  const Unit* unit_ = nullptr;
  UnitSaved saved_;
  Buffer memory_;
  View hidden_, gradient_;
  Tokens tokens_;
  LossSums losses_;
  RouterMemory router_;
  Arena keep_, backward_, scratch_;
  SegmentContext ctx_;
};

// The best rate of dense products here, by our kernels or oneDNN's; shapes are the probe's (bench/probe.cpp).
class ProductPeak {
 public:
  ProductPeak(const Backend& backend, DType dtype, ThreadPool& pool) : dtype_(dtype), pool_(pool), own_(backend) {
    constexpr int64_t kLargest = 8192 * 512;
    x_ = Buffer(kLargest * dtype_bytes(dtype));
    w_ = Buffer(kLargest * dtype_bytes(dtype));
    y_ = Buffer(8192 * 1536 * dtype_bytes(dtype));
    for (Buffer* b : {&x_, &w_, &y_}) std::fill_n(b->data(), b->bytes(), 0);
    if (cpu::onednn_built() && (dtype == DType::kF32 || cpu::active_isa() >= cpu::Isa::kAvx512Bf16)) {
      onednn_.linear = cpu::onednn_linear_kernels();
      has_onednn_ = true;
    }
  }

  // Adds `seconds` of looking for a higher one.
  void measure(double seconds) {
    constexpr int64_t kShapes[][3] = {{2048, 2048, 2048}, {8192, 512, 512}, {8192, 1536, 512}, {768, 512, 512}};
    const double share = seconds / static_cast<double>(std::size(kShapes) * (has_onednn_ ? 2 : 1));
    for (const auto& [m, n, k] : kShapes)
      for (const bool onednn : {false, true}) {
        if (onednn && !has_onednn_) continue;
        const LinearForward args{.x = View(x_.data(), {m, k}, dtype_),
                                 .w = View(w_.data(), {n, k}, dtype_),
                                 .bias = {},
                                 .y = View(y_.data(), {m, n}, dtype_)};
        const Context ctx{.backend = onednn ? &onednn_ : &own_, .pool = &pool_, .scratch = &scratch_};
        const double flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
        const double until = steady_seconds() + share;
        for (int i = 0; i < 2 || steady_seconds() < until; ++i) {
          const double t = steady_seconds();
          linear_forward(ctx, args);
          if (const double rate = flops / (steady_seconds() - t); rate > best_)
            best_ = rate, by_ = onednn ? "onednn" : "own";
        }
      }
  }
  double best() const { return best_; }
  const char* by() const { return by_; }

 private:
  DType dtype_;
  ThreadPool& pool_;
  const Backend& own_;
  Backend onednn_;
  bool has_onednn_ = false;
  Buffer x_, w_, y_;
  Arena scratch_{64 << 20};
  double best_ = 0;
  const char* by_ = "";
};

struct Arguments {
  std::vector<int64_t> tokens{1024, 8192};
  std::vector<std::string> skews{"even", "zipf", "one"};
  MoeCase shape;
  std::string dtype = "bf16";
  double seconds = 1;
  RunSection run;  // threads and cores
  uint64_t seed = 1;
  bool json = false;
};

void run_bench_moe(const Arguments& a) {
  std::vector<MoeCase> cases;
  for (const int64_t tokens : a.tokens)
    for (const std::string& skew : a.skews) {
      MoeCase c = a.shape;
      c.tokens = tokens;
      c.skew = skew_by_name(skew);
      c.dtype = a.dtype == "f32" ? DType::kF32 : DType::kBF16;
      check_moe_case(c);
      cases.push_back(c);
    }
  ThreadPool pool(a.run.threads, pinned_cores(a.run));
  const Backend& backend = backend_by_name("cpu");
  ProductPeak peak(backend, cases[0].dtype, pool);
  if (!a.json)
    fmt::print("{:>8} {:>5} {:>9} {:>12} {:>16} {:>14} {:>6}\n", "tokens", "skew", "max/mean", "tokens/s",
               "products GFLOP/s", "best GFLOP/s", "ratio");
  for (const MoeCase& c : cases) {
    peak.measure(a.seconds / 2);
    const MoeFigures f = run_moe_case(c, backend, pool, a.seconds, a.seed);
    peak.measure(a.seconds / 2);
    const double tokens_per_s = static_cast<double>(c.tokens) / f.seconds, rate = f.product_flops / f.product_seconds;
    if (!a.json) {
      fmt::print("{:>8} {:>5} {:>9.2f} {:>12.0f} {:>16.1f} {:>14.1f} {:>6.2f}\n", c.tokens, skew_name(c.skew),
                 f.max_over_mean, tokens_per_s, rate / 1e9, peak.best() / 1e9, rate / peak.best());
      std::fflush(stdout);
      continue;
    }
    nlohmann::json parts;
    for (size_t i = 0; i < f.profile.seconds.size(); ++i)
      if (f.profile.calls[i] > 0) parts[op_family_name(static_cast<OpFamily>(i))] = f.profile.seconds[i];
    fmt::print("{}\n", nlohmann::json{{"tokens", c.tokens},
                                      {"experts", c.experts},
                                      {"top_k", c.top_k},
                                      {"hidden", c.hidden},
                                      {"width", c.width},
                                      {"skew", skew_name(c.skew)},
                                      {"dtype", a.dtype},
                                      {"threads", pool.size()},
                                      {"tokens_per_s", tokens_per_s},
                                      {"layer_seconds", f.seconds},
                                      {"seconds", parts},
                                      {"product_flops_per_s", rate},
                                      {"best_product_flops_per_s", peak.best()},
                                      {"best_product_by", peak.by()},
                                      {"product_ratio", rate / peak.best()},
                                      {"max_over_mean", f.max_over_mean}}
                           .dump());
    std::fflush(stdout);
  }
  if (!a.json) fmt::print("best: dense products by {}, in this run\n", peak.by());
}

}  // namespace

void check_moe_case(const MoeCase& c) {
  if (c.top_k > c.experts)
    throw Error(ErrorCode::kUsage, "--top-k", fmt::format("{} of {} experts", c.top_k, c.experts),
                "A token chooses an expert once: lower --top-k or raise --experts.");
  if (c.hidden < c.experts)
    throw Error(ErrorCode::kUsage, "--hidden", fmt::format("{} for {} experts", c.hidden, c.experts),
                "It must be at least --experts, for the bench steers each expert by an element of its own.");
}

MoeFigures run_moe_case(const MoeCase& c, const Backend& backend, ThreadPool& pool, double seconds, uint64_t seed) {
  MoeLayer layer(c, backend, pool, seed);
  MoeFigures f;
  f.product_flops = 18.0 * static_cast<double>(c.tokens * c.top_k) * static_cast<double>(c.hidden * c.width);
  layer.run();  // memory is touched, tables are made
  OpProfile profile;
  layer.set_profile(&profile);
  const double until = steady_seconds() + seconds;
  for (int i = 0; i < 3 || steady_seconds() < until; ++i) {
    profile = {};
    const double start = steady_seconds();
    layer.run();
    const double took = steady_seconds() - start;
    if (i > 0 && took >= f.seconds) continue;
    f.seconds = took;
    f.profile = profile;
    f.product_seconds = profile.seconds[static_cast<size_t>(OpFamily::kExperts)];
  }
  f.max_over_mean = layer.max_over_mean();
  return f;
}

void add_bench_moe(CLI::App& bench) {
  auto a = std::make_shared<Arguments>();
  CLI::App* c = bench.add_subcommand("moe", "one MoE layer, forward and backward, over row counts and skews");
  c->add_option("--tokens", a->tokens, "tokens of a case; several: 1024,8192")
      ->delimiter(',')
      ->check(whole_number(1, kMostTokens))
      ->capture_default_str();
  c->add_option("--skew", a->skews, "even | zipf | one (all tokens to one expert); several: even,zipf")
      ->delimiter(',')
      ->capture_default_str();
  c->add_option("--experts", a->shape.experts, "routed experts")->check(whole_number(1, 65536))->capture_default_str();
  c->add_option("--top-k", a->shape.top_k, "experts of a token")->check(whole_number(1, 65536))->capture_default_str();
  c->add_option("--hidden", a->shape.hidden, "hidden size")->check(whole_number(1, 1 << 20))->capture_default_str();
  c->add_option("--width", a->shape.width, "an expert's intermediate size")
      ->check(whole_number(1, 1 << 20))
      ->capture_default_str();
  c->add_option("--dtype", a->dtype, "bf16 | f32")->check(CLI::IsMember({"f32", "bf16"}))->capture_default_str();
  c->add_option("--seconds", a->seconds, "for each case, and as long for the best product")
      ->check(number(0, 3600))
      ->capture_default_str();
  add_thread_options(*c, a->run);
  c->add_option("--seed", a->seed, "of weights, rows and routing")->capture_default_str();
  c->add_flag("--json", a->json, "one JSON object a line");
  c->callback([a] { run_bench_moe(*a); });
}

}  // namespace concerto
