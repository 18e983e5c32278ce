#include "concerto/cli/bench_command.h"

#include <sys/wait.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "concerto/arch/model_spec.h"
#include "concerto/base/clock.h"
#include "concerto/base/rng.h"
#include "concerto/cli/backends.h"
#include "concerto/cli/bench_moe.h"
#include "concerto/cli/option_checks.h"
#include "concerto/train/human_units.h"
#include "concerto/train/memory_report.h"
#include "concerto/train/trainer.h"

namespace concerto {
namespace {

struct BenchArguments {
  std::string model, data, dtype = "bf16", moments_dtype = "f32", backend = "cpu", schedule = "1f1b", rival;
  int64_t batch = 8, seq = 1024, steps = 4, seed = 1;
  Recompute recompute = Recompute::kNone;
  RunSection run;  // threads and cores
  bool json = false;
};

// Fresh random tokens every step, one document a row.
void random_batch(const ModelConfig& m, const BenchArguments& a, int64_t step, MicroBatch& b) {
  const Rng rng(static_cast<uint64_t>(a.seed), "bench tokens");
  const int64_t tokens = a.batch * a.seq, depth = m.num_nextn_predict_layers;
  b = {};
  const auto token = [&](int64_t row, int64_t at) {
    return static_cast<int32_t>(rng.below(static_cast<uint64_t>((step * a.batch + row) * (a.seq + depth + 1) + at),
                                          static_cast<uint64_t>(m.vocab_size)));
  };
  b.doc_offsets = {0};
  for (int64_t row = 0; row < a.batch; ++row) {
    for (int64_t s = 0; s < a.seq; ++s) {
      b.token_ids.push_back(token(row, s));
      b.positions.push_back(static_cast<int32_t>(s));
      b.targets.push_back(token(row, s + 1));
    }
    b.doc_offsets.push_back(static_cast<int32_t>(b.tokens()));
  }
  b.row_offsets = b.doc_offsets;
  for (int64_t d = 0; d < depth; ++d)
    for (int64_t t = 0; t < tokens; ++t) {
      b.mtp_token_ids.push_back(token(t / a.seq, t % a.seq + 1 + d));
      b.mtp_targets.push_back(token(t / a.seq, t % a.seq + 2 + d));
    }
}

RunConfig bench_config(const BenchArguments& a) {
  RunConfig c;
  c.run.seed = a.seed;
  c.model.path = a.model;
  c.model.config = load_model_config(a.model);
  c.training.global_batch_size = c.training.micro_batch_size = a.batch;
  c.training.seq_length = a.seq;
  c.training.steps = a.steps;
  c.training.dtype = a.dtype;
  c.optimizer.moments_dtype = a.moments_dtype;
  c.parallel.recompute = a.recompute;
  c.parallel.schedule = a.schedule;
  if (!a.data.empty()) c.data.train = {{a.data, 1.0}};
  c.backend = a.backend;
  check_capacity(c, true);
  return c;
}

// Runs the rival's command and returns the best tokens_per_s of its JSON lines.
double run_rival(const std::string& command) {
  FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) throw Error(ErrorCode::kIo, "--rival", "cannot be started: " + command);
  std::string text;
  char buffer[4096];
  while (size_t n = fread(buffer, 1, sizeof buffer, pipe)) text.append(buffer, n);
  const int status = pclose(pipe), exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  double best = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const auto line = nlohmann::json::parse(text.substr(at, end - at), nullptr, false);
    if (line.is_object() && line.contains("tokens_per_s") && line["tokens_per_s"].is_number())
      best = std::max(best, line["tokens_per_s"].get<double>());
    at = end + 1;
  }
  if (status != 0 || best <= 0)
    throw Error(ErrorCode::kUsage, "--rival",
                fmt::format("ended with status {} and {} usable lines", exit_code, best > 0 ? "some" : "no"),
                "It must print JSON lines that hold tokens_per_s.");
  return best;
}

void run_bench_step(const BenchArguments& a) {
  const RunConfig config = bench_config(a);
  const ModelConfig& m = config.model.config;
  check_micro_batch("--batch", m, a.batch, a.seq);
  const int64_t baseline = read_process_memory().rss_bytes;
  ThreadPool pool(a.run.threads, pinned_cores(a.run));
  StepEngine engine(config, backend_by_name(a.backend), pool);
  engine.first_touch_state();
  engine.store().initialize(m, config.model.init_method, static_cast<uint64_t>(a.seed), pool);
  engine.first_touch_work();
  OpProfile profile, best_profile;
  engine.executor().set_profile(&profile);
  std::unique_ptr<BatchSource> source;
  if (!a.data.empty()) source = std::make_unique<BatchSource>(train_source_options(config));
  std::vector<MicroBatch> batches(1);
  StepReport report;
  std::string why;
  double best = 0;
  for (int64_t step = 1; step <= a.steps; ++step) {
    if (source)
      source->fill((step - 1) * a.batch, a.batch, a.batch, batches);
    else
      random_batch(m, a, step, batches[0]);
    profile = {};
    const double start = steady_seconds();
    engine.step(step, batches, nullptr, report, why);
    const double seconds = steady_seconds() - start;
    const bool better = best == 0 || seconds < best;
    if (better) {
      best = seconds;
      best_profile = profile;
    }
    if (a.json)
      fmt::print(
          "{}\n",
          nlohmann::json{{"step", step}, {"loss", report.loss}, {"grad_norm", report.grad_norm}, {"seconds", seconds}}
              .dump());
    else
      fmt::print("step {}: {:.3f} s, loss {:.6f}, gradient norm {:.4f}\n", step, seconds, report.loss,
                 report.grad_norm);
    std::fflush(stdout);
  }
  nlohmann::json parts;
  double counted = 0;
  for (size_t i = 0; i < best_profile.seconds.size(); ++i) {
    if (best_profile.calls[i] == 0) continue;
    parts[op_family_name(static_cast<OpFamily>(i))] = best_profile.seconds[i];
    counted += best_profile.seconds[i];
  }
  parts["other"] = best - counted;
  const double rate = static_cast<double>(a.batch * a.seq) / best, flops = flops_per_token(m, a.seq);
  nlohmann::json out{{"tokens_per_s", rate},
                     {"step_seconds", best},
                     {"flops_per_token", flops},
                     {"flops_per_s", flops * rate},
                     {"seconds", parts},
                     {"peak_bytes", read_process_memory().peak_bytes},
                     {"predicted_peak_bytes", baseline + engine.predicted_bytes()},
                     {"parameters", parameter_count(m)},
                     {"active_parameters", active_parameter_count(m)},
                     {"threads", pool.size()},
                     {"dtype", a.dtype},
                     {"moments_dtype", a.moments_dtype},
                     {"backend", a.backend}};
  if (!a.rival.empty()) {
    pool.leave_core();  // a pinned thread's child would have its one core
    const double rival = run_rival(a.rival);
    out["rival_tokens_per_s"] = rival;
    out["ratio"] = rate / rival;
  }
  if (a.json) {
    fmt::print("{}\n", out.dump());
    return;
  }
  fmt::print("\nbest step {:.3f} s: {:.0f} tokens/s, {:.1f} GFLOP/s\n", best, rate, flops * rate / 1e9);
  for (const auto& [name, value] : parts.items())
    fmt::print("  {:<12} {:7.3f} s {:5.1f} %\n", name, value.get<double>(), 100 * value.get<double>() / best);
  fmt::print("memory    {}\n", format_memory_report({.baseline_bytes = baseline,
                                                     .predicted_bytes = engine.predicted_bytes(),
                                                     .peak_bytes = read_process_memory().peak_bytes}));
  if (out.contains("ratio"))
    fmt::print("rival     {:.0f} tokens/s, ratio {:.2f}\n", out["rival_tokens_per_s"].get<double>(),
               out["ratio"].get<double>());
}

}  // namespace

void add_bench_command(CLI::App& app) {
  auto a = std::make_shared<BenchArguments>();
  CLI::App* bench = app.add_subcommand("bench", "measure, beside a rival");
  bench->require_subcommand(1);
  CLI::App* c = bench->add_subcommand("step", "a training step on random weights and tokens");
  c->add_option("--model", a->model, "folder with a config.json")->required();
  c->add_option("--data", a->data,
                "prefix of a .bin/.idx pair: tokens and losses of a `train` of as many steps, else at its defaults");
  c->add_option("--batch", a->batch, "sequences")->check(whole_number(1, kMostTokens))->capture_default_str();
  c->add_option("--seq", a->seq, "tokens a sequence")->check(whole_number(1, kMostTokens))->capture_default_str();
  c->add_option("--steps", a->steps, "the best of these counts")
      ->check(whole_number(1, INT64_MAX))
      ->capture_default_str();
  c->add_option("--dtype", a->dtype, "bf16 | f32")->check(CLI::IsMember({"f32", "bf16"}))->capture_default_str();
  c->add_option("--moments-dtype", a->moments_dtype, "f32 | bf16: optimizer.moments_dtype")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str();
  c->add_option("--backend", a->backend, "cpu | ref")->capture_default_str();
  add_recompute_option(*c, a->recompute);
  c->add_option("--schedule", a->schedule, "1f1b | zero_bubble")
      ->check(CLI::IsMember({"1f1b", "zero_bubble"}))
      ->capture_default_str();
  add_thread_options(*c, a->run);
  c->add_option("--seed", a->seed, "of weights and tokens")->capture_default_str();
  c->add_option("--rival", a->rival,
                "a command that prints JSON lines with tokens_per_s; run after, its ratio printed");
  c->add_flag("--json", a->json, "one JSON object a line");
  c->callback([a] { run_bench_step(*a); });
  add_bench_moe(*bench);
}

}  // namespace concerto
