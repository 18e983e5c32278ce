#include "concerto/cli/launch_command.h"

#include <signal.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>

#include "concerto/base/cores.h"
#include "concerto/cli/overrides.h"
#include "concerto/cli/train_command.h"
#include "concerto/comm/local/local_world.h"
#include "concerto/topology/layout.h"
#include "concerto/train/signals.h"

namespace concerto {
namespace {

// Threads that each of the ranks on this machine computes with.
int threads_of_rank(const RunConfig& config, int ranks) {
  if (config.run.threads > 0) return config.run.threads;
  return std::max(1, usable_cores() / ranks);
}

void launch_threads(const RunConfig& config, int ranks, bool json) {
  const StopSignals signals(StopMeans::kQuit);
  ::signal(SIGPIPE, SIG_IGN);  // whoever reads the progress may leave; the run goes on
  for (const std::string& note : config.notes) fmt::print(stderr, "note: {}\n", note);
  resolve_layout(config, ranks);  // one error, before there are ranks
  const int threads = threads_of_rank(config, ranks);
  run_local_ranks(ranks, [&](Communicator& world) { train_rank(config, &world, threads, json); },
                  {.deadline_seconds = config.parallel.timeout_minutes * 60});
}

}  // namespace

void add_launch_command(CLI::App& app) {
  struct Options {
    std::string config;
    int ranks = 0;
    bool threads = false, json = false;
  };
  CLI::App* c = app.add_subcommand("launch", "train on many ranks: threads of one process, or processes over MPI");
  auto o = std::make_shared<Options>();
  c->add_option("CONFIG", o->config, "a YAML or JSON config; --section.key=value behind it overrides a setting")
      ->required();
  c->add_option("-n,--ranks", o->ranks, "how many ranks")->required()->check(CLI::Range(1, 4096));
  c->add_flag("--threads", o->threads, "ranks are threads of this process");
  c->add_flag("--json", o->json, "print the result as one JSON object; what else is shown goes to standard error");
  c->allow_extras();
  c->callback(
      [c, o] { launch_threads(load_run_config(o->config, parse_overrides(c->remaining())), o->ranks, o->json); });
}

}  // namespace concerto
