#include "concerto/cli/verify_command.h"

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "concerto/cli/backends.h"
#include "concerto/cli/golden.h"
#include "concerto/cli/option_checks.h"
#include "concerto/train/work_line.h"

namespace concerto {
namespace {

struct VerifyArguments {
  std::string model, golden, backend = "cpu", schedule = "1f1b";
  int64_t micro_batches = 1;
  Recompute recompute = Recompute::kNone;
  RunSection run;  // threads and cores
  bool json = false, all = false;
};

void print_json(const GoldenReport& r) {
  for (const GoldenLine& l : r.lines)
    fmt::print("{}\n", nlohmann::json{{"name", l.name},
                                      {"max", l.max},
                                      {"l2", l.l2},
                                      {"tolerance", {l.tolerance_max, l.tolerance_l2}},
                                      {"ok", l.ok()}}
                           .dump());
  fmt::print(
      "{}\n",
      nlohmann::json{
          {"ok", r.ok()}, {"compared", r.lines.size()}, {"fed", r.fed.size()}, {"unused", r.unused}, {"total", r.total}}
          .dump());
}

void print_text(const GoldenReport& r, bool all) {
  fmt::print("{:<58} {:>9} {:>9} {:>9} {:>9}\n", "tensor", "max", "tol", "l2", "tol");
  for (const GoldenLine& l : r.lines)
    if (all || !l.ok())
      fmt::print("{:<58} {:>9.2e} {:>9.0e} {:>9.2e} {:>9.0e}{}\n", l.name, l.max, l.tolerance_max, l.l2, l.tolerance_l2,
                 l.ok() ? "" : "  FAIL");
  for (const std::string& name : r.unused) fmt::print("{:<58} neither fed nor compared  FAIL\n", name);
  fmt::print("{}: {} tensors compared, {} fed, {} in the file\n", r.ok() ? "OK" : "FAIL", r.lines.size(), r.fed.size(),
             r.total);
}

void run_verify(const VerifyArguments& a) {
  ThreadPool pool(a.run.threads, pinned_cores(a.run));
  GoldenOptions options;
  options.model_dir = a.model.empty() ? a.golden : a.model;
  options.golden_dir = a.golden;
  options.schedule = a.schedule;
  options.recompute = a.recompute;
  options.micro_batches = a.micro_batches;
  const GoldenReport report = [&] {
    WorkLine line("verifying " + options.model_dir, "passes");
    options.progress = [&line](int64_t done, int64_t total) { line.set(done, total); };
    return verify_golden(options, backend_by_name(a.backend), pool);
  }();
  if (a.json)
    print_json(report);
  else
    print_text(report, a.all);
  if (!report.ok()) {
    int64_t bad = static_cast<int64_t>(report.unused.size());
    for (const GoldenLine& l : report.lines) bad += !l.ok();
    throw Error(ErrorCode::kNumeric, a.golden,
                fmt::format("{} of {} tensors do not agree with the reference", bad, report.total));
  }
}

}  // namespace

void add_verify_command(CLI::App& app) {
  auto a = std::make_shared<VerifyArguments>();
  CLI::App* c = app.add_subcommand("verify", "compare a model with a recorded reference, tensor by tensor");
  c->add_option("--golden", a->golden, "folder with golden.safetensors and case.json")->required();
  c->add_option("--model", a->model, "model folder (default: the golden folder)");
  c->add_option("--backend", a->backend, "cpu | ref")->capture_default_str();
  c->add_option("--schedule", a->schedule, "1f1b | zero_bubble")
      ->check(CLI::IsMember({"1f1b", "zero_bubble"}))
      ->capture_default_str();
  add_recompute_option(*c, a->recompute);
  c->add_option("--micro-batches", a->micro_batches,
                "the rows in so many micro-batches (without aux loss the numbers are the same)")
      ->check(whole_number(1, kMostTokens))
      ->capture_default_str();
  add_thread_options(*c, a->run);
  c->add_flag("--all", a->all, "print every tensor, not only those that fail");
  c->add_flag("--json", a->json, "one JSON object a line");
  c->callback([a] { run_verify(*a); });
}

}  // namespace concerto
