#include "concerto/cli/launch_command.h"

#include <signal.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <mutex>

#include "concerto/base/files.h"
#include "concerto/cli/job_error.h"
#include "concerto/cli/overrides.h"
#include "concerto/cli/rank_guard.h"
#include "concerto/cli/supervisor.h"
#include "concerto/cli/train_command.h"
#include "concerto/comm/action_log.h"
#include "concerto/comm/local/local_world.h"
#include "concerto/topology/layout.h"
#include "concerto/train/signals.h"

namespace concerto {
namespace {

constexpr const char* kFooter = R"(
Ranks are processes over MPI, or with --threads threads of this process. How the model is cut into them is said by
`parallel` of the config (concerto config help parallel); data parallel ranks are what is left of -n.

  concerto launch -n 4 examples/parallel_4.yaml                       4 processes on this machine
  concerto launch -n 4 --threads examples/parallel_4.yaml             the same numbers, without MPI
  concerto launch -n 16 --hostfile hosts CONFIG                       on other machines: a line `NAME slots=8` each
  concerto launch CONFIG                                              inside sbatch or salloc: Slurm's tasks and nodes
  mpirun -n 4 concerto train CONFIG, srun --mpi=pmix concerto train CONFIG     without a supervisor

Each rank computes with run.threads threads; without it the processors of a machine are dealt to its ranks.
All machines need the same program and the same files under the same names; run.dir must be one that all of them see.

Ctrl-C, SIGTERM and SIGUSR1: all ranks finish the step, save once and end. Ctrl-C again ends them at once.
When a rank fails the others are ended, and this command says which it was, where it stands in the mesh and what it did
last, and exits with its code. The same command goes on from the last checkpoint, on another number of ranks too.)";

// Which rank failed first, and what it was doing.
class FirstFailure {
 public:
  void note(int rank) {
    const std::lock_guard lock(mutex_);
    if (rank_ < 0) rank_ = rank;
  }
  int rank() const { return rank_; }

 private:
  std::mutex mutex_;
  int rank_ = -1;
};

void launch_threads(const RunConfig& config, int ranks, bool json) {
  const StopSignals signals(StopMeans::kQuit);
  ::signal(SIGPIPE, SIG_IGN);  // whoever reads the progress may leave; the run goes on
  const JobFolder folder(std::filesystem::temp_directory_path().string());
  ::setenv(kJobFolderVariable, folder.path().c_str(), 1);
  FirstFailure failure;
  try {
    run_local_ranks(
        ranks,
        [&](Communicator& world) {
          try {
            train_rank(config, ranks > 1 ? &world : nullptr, rank_threads(config, {ranks, world.rank()}), json);
          } catch (const PeerError&) {
            throw;
          } catch (...) {
            failure.note(world.rank());
            throw;
          }
        },
        {.deadline_seconds = config.parallel.timeout_minutes * 60});
  } catch (...) {
    ::unsetenv(kJobFolderVariable);
    if (ranks > 1 && failure.rank() >= 0 && path_exists(ActionLog::path(folder.path(), failure.rank()))) {
      const LastActions last = read_last_actions(ActionLog::path(folder.path(), failure.rank()));
      fmt::print(stderr, "{} failed. Its last action: {}. {}\n", last.place, last.last(), how_to_go_on(config.run.dir));
    }
    throw;
  }
  ::unsetenv(kJobFolderVariable);
}

struct LaunchOptions {
  JobRequest request;
  bool threads = false;
};

void launch(LaunchOptions o) {
  JobRequest& r = o.request;
  if (const char* tasks = std::getenv("SLURM_NTASKS"); r.ranks == 0 && tasks) r.ranks = std::atoi(tasks);
  if (r.ranks < 1)
    throw Error(ErrorCode::kUsage, "concerto launch", "-n RANKS is required outside a Slurm allocation",
                "Run `concerto launch --help`.");
  if (o.threads && !r.hostfile.empty())
    throw Error(ErrorCode::kUsage, "--hostfile", "threads are all of this process", "Leave out one of the two.");
  // What is wrong with the config is said once, before there are ranks.
  const RunConfig config = load_run_config(r.config, parse_overrides(r.overrides));
  check_trainable(config);
  for (const std::string& note : config.notes) fmt::print(stderr, "note: {}\n", note);
  resolve_layout(config, r.ranks);
  if (o.threads)
    launch_threads(config, r.ranks, r.json);
  else
    supervise(r, config);
}

}  // namespace

void add_launch_command(CLI::App& app) {
  CLI::App* c = app.add_subcommand("launch", "train on many ranks, here or on a cluster, and watch over them");
  auto o = std::make_shared<LaunchOptions>();
  c->add_option("CONFIG", o->request.config, "a YAML or JSON config; --section.key=value behind it overrides a setting")
      ->required();
  c->add_option("-n,--ranks", o->request.ranks,
                "how many ranks; inside a Slurm allocation its number of tasks if not given")
      ->check(CLI::Range(1, 65536));
  c->add_flag("--threads", o->threads, "ranks are threads of this process: for trying a layout, no MPI needed");
  c->add_option("--hostfile", o->request.hostfile,
                "machines to start ranks on, as mpirun reads it: `NAME slots=RANKS` a line")
      ->check(CLI::ExistingFile);
  c->add_flag("--json", o->request.json,
              "print the result as one JSON object; what else is shown goes to standard error");
  c->footer(kFooter);
  c->allow_extras();
  c->callback([c, o] {
    o->request.overrides = c->remaining();
    launch(*o);
  });
}

}  // namespace concerto
