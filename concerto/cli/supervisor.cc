#include "concerto/cli/supervisor.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "concerto/base/clock.h"
#include "concerto/base/cores.h"
#include "concerto/base/files.h"
#include "concerto/checkpoint/checkpoint.h"
#include "concerto/cli/job_error.h"
#include "concerto/cli/rank_guard.h"
#include "concerto/comm/action_log.h"
#include "concerto/comm/mpi/mpi_world.h"

namespace concerto {
namespace {

std::string find_program(const char* name) {
  const char* path = std::getenv("PATH");
  std::string_view left = path ? path : "";
  while (!left.empty()) {
    const size_t colon = std::min(left.find(':'), left.size());
    const std::string candidate = fmt::format("{}/{}", left.substr(0, colon), name);
    if (::access(candidate.c_str(), X_OK) == 0) return candidate;
    left.remove_prefix(std::min(colon + 1, left.size()));
  }
  return "";
}

constexpr int kNoProgram = 127;

[[noreturn]] void become(const std::vector<std::string>& command, const std::string& folder, pid_t parent,
                         const sigset_t& mask) {
  ::setpgid(0, 0);                     // Ctrl-C of the terminal is for the supervisor, which asks for a save
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);  // mpirun and srun then end their ranks
  if (::getppid() != parent) ::_exit(1);
  ::sigprocmask(SIG_SETMASK, &mask, nullptr);
  const int nothing = ::open("/dev/null", O_RDONLY);
  if (nothing >= 0) ::dup2(nothing, STDIN_FILENO);
  ::setenv(kJobFolderVariable, folder.c_str(), 1);
  std::vector<char*> arguments;
  for (const std::string& a : command) arguments.push_back(const_cast<char*>(a.c_str()));
  arguments.push_back(nullptr);
  ::execv(arguments[0], arguments.data());
  ::_exit(kNoProgram);
}

bool rank_has_failed(const std::string& folder) {
  const std::vector<RankEnd> ends = read_rank_ends(folder);
  return std::any_of(ends.begin(), ends.end(), [](const RankEnd& e) { return e.failed(); });
}

// Its place and action, of its file.
struct RankStory {
  std::string place, action;
};
RankStory rank_story(const std::string& folder, int rank) {
  try {
    const LastActions last = read_last_actions(ActionLog::path(folder, rank));
    return {last.place, last.last()};
  } catch (const Error&) {
    return {fmt::format("rank {}", rank), "not yet in the job: it was starting"};
  }
}

JobError failure(const std::string& folder, const JobEnd& end, const RunConfig& config, int ranks) {
  const std::string fix = how_to_go_on(config.run.dir);
  const std::vector<RankEnd> ends = read_rank_ends(folder);
  const auto first = std::find_if(ends.begin(), ends.end(), [](const RankEnd& e) { return e.failed(); });
  const std::string others = ranks > 1 ? ". The other ranks were ended" : "";
  if (first == ends.end()) {
    std::string what =
        fmt::format("the job ended with exit code {}, and no rank has told why. Their last actions:", end.exit_code);
    for (int r = 0; r < ranks; ++r) {
      const RankStory story = rank_story(folder, r);
      what += fmt::format("\n  {}: {}", story.place, story.action);
    }
    return {Error(ErrorCode::kComm, "launch", what, "\n" + fix), end.exit_code};
  }
  const RankStory story = rank_story(folder, first->rank);
  if (first->signal != 0) {
    const char* guess = first->signal == SIGKILL ? ", from outside, as the system does when memory runs out" : "";
    return {Error(ErrorCode::kComm, story.place,
                  fmt::format("was killed by {}{}. Its last action: {}{}", signal_text(first->signal), guess,
                              story.action, others),
                  fix),
            first->job_exit_code()};
  }
  const bool known = first->exit_code >= static_cast<int>(ErrorCode::kUsage) &&
                     first->exit_code <= static_cast<int>(ErrorCode::kUnsupported);
  return {
      Error(known ? static_cast<ErrorCode>(first->exit_code) : ErrorCode::kComm, story.place,
            fmt::format("ended with exit code {}. Its last action: {}{}", first->exit_code, story.action, others), fix),
      first->exit_code};
}

}  // namespace

Surroundings look_around() {
  Surroundings s;
  s.program = std::filesystem::read_symlink("/proc/self/exe").string();
  s.mpirun = find_program("mpirun");
  s.srun = find_program("srun");
  s.root = ::geteuid() == 0;
  s.slurm = std::getenv("SLURM_JOB_ID") != nullptr;
  s.cores = usable_cores();
  return s;
}

std::vector<std::string> job_command(const JobRequest& request, const Surroundings& around) {
  std::vector<std::string> c;
  const std::string ranks = std::to_string(request.ranks);
  if (!around.mpirun.empty()) {
    c = {around.mpirun, "-q", "-n", ranks, "--bind-to", "none", "-x", kJobFolderVariable};
    if (around.root) c.push_back("--allow-run-as-root");
    if (!request.hostfile.empty()) {
      c.insert(c.end(), {"--hostfile", request.hostfile});
    } else if (!around.slurm) {
      c.push_back("--oversubscribe");  // mpirun counts cores where we count threads
      if (request.ranks > around.cores) c.insert(c.end(), {"-x", "OMP_NUM_THREADS=1"});
    }
  } else if (around.slurm && !around.srun.empty()) {
    if (!request.hostfile.empty())
      throw Error(ErrorCode::kUsage, "--hostfile", "inside a Slurm allocation the nodes are Slurm's", "Leave it out.");
    c = {around.srun, "-n", ranks, "--mpi=pmix", "--kill-on-bad-exit=1"};
    if (const char* each = std::getenv("SLURM_CPUS_PER_TASK"))
      c.insert(c.end(), {"-c", each});  // srun does not ask sbatch
  } else {
    throw Error(ErrorCode::kUnsupported, "launch", "there is no mpirun, which starts ranks as processes",
                "Install openmpi-bin and libopenmpi-dev, or use --threads.");
  }
  c.insert(c.end(), {around.program, "train", request.config});
  c.insert(c.end(), request.overrides.begin(), request.overrides.end());
  if (request.json) c.push_back("--json");
  return c;
}

JobEnd run_job(const std::vector<std::string>& command, const std::string& folder, double grace_seconds) {
  sigset_t signals, before;
  ::sigemptyset(&signals);
  for (const int s : {SIGCHLD, SIGTERM, SIGINT, SIGUSR1, SIGHUP}) ::sigaddset(&signals, s);
  ::sigprocmask(SIG_BLOCK, &signals, &before);
  const pid_t parent = ::getpid(), child = ::fork();
  if (child < 0)
    throw Error(ErrorCode::kIo, "fork", fmt::format("cannot start {}: {}", command[0], std::strerror(errno)));
  if (child == 0) become(command, folder, parent, before);
  const timespec poll{0, 250'000'000};
  JobEnd end;
  double interrupted = 0, failed = 0;
  bool terminated = false;
  for (;;) {
    const int signal = ::sigtimedwait(&signals, nullptr, &poll);
    int status = 0;
    if (::waitpid(child, &status, WNOHANG) == child) {
      end.exit_code = end.quit ? 128 + SIGINT : WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      break;
    }
    const double now = steady_seconds();
    if (signal == SIGINT && interrupted > 0 && now - interrupted > 0.05) {
      end.quit = true;
      ::kill(child, SIGTERM);
      failed = now;
    } else if (signal == SIGINT || signal == SIGTERM || signal == SIGUSR1 || signal == SIGHUP) {
      if (signal == SIGINT && interrupted == 0) {
        interrupted = now;
        if (::isatty(STDERR_FILENO))
          fmt::print(stderr, "\nStopping after this step and saving. Ctrl-C again quits at once without saving.\n");
      }
      if (end.signal == 0) end.signal = signal;
      ::kill(child, SIGUSR1);
    }
    if (failed == 0 && rank_has_failed(folder)) failed = now;
    if (failed > 0 && now - failed > grace_seconds && !terminated) {  // mpirun ends them within a second by itself
      terminated = true;
      ::kill(child, SIGTERM);
    }
    if (failed > 0 && now - failed > grace_seconds + 1.5) ::kill(-child, SIGKILL);
  }
  ::sigprocmask(SIG_SETMASK, &before, nullptr);
  return end;
}

std::string how_to_go_on(const std::string& run_dir) {
  const std::vector<CheckpointInfo> checkpoints = list_checkpoints(run_dir);
  const CheckpointInfo* last = nullptr;
  for (const CheckpointInfo& c : checkpoints)
    if (c.fault.empty() && (!last || c.sequence > last->sequence)) last = &c;
  return last ? fmt::format("The same command goes on from checkpoint {} of {}.", last->step, run_dir)
              : "There is no checkpoint yet: the same command starts anew.";
}

JobFolder::JobFolder(const std::string& in) {
  make_directories(in);
  path_ = std::filesystem::absolute(in).string() + "/ranks-XXXXXX";
  if (::mkdtemp(path_.data()) == nullptr)
    throw Error(ErrorCode::kIo, in, fmt::format("no folder can be made in it: {}", std::strerror(errno)));
}

JobFolder::~JobFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

void supervise(const JobRequest& request, const RunConfig& config) {
  if (!mpi_is_built())
    throw Error(ErrorCode::kUnsupported, "launch", "this build has no MPI, over which ranks are processes",
                "Install libopenmpi-dev and build again (scripts/build.sh release), or use --threads.");
  const Surroundings around = look_around();
  const std::vector<std::string> command = job_command(request, around);
  const bool one_machine = request.hostfile.empty() && !around.slurm;
  const JobFolder folder(one_machine ? std::filesystem::temp_directory_path().string() : config.run.dir);
  // One start. Whoever wants to start the ranks again after a failure does it here: run_job() leaves none of them
  // behind, and the run folder says where to go on.
  const JobEnd end = run_job(command, folder.path());
  if (end.quit) throw QuietEnd{end.exit_code};
  // Asked to end before the first step, when there is nothing to save: ranks end by the signal that was passed on.
  if (end.signal != 0 && end.exit_code == 128 + SIGUSR1) throw QuietEnd{128 + end.signal};
  if (end.exit_code == kNoProgram && read_rank_ends(folder.path()).empty())
    throw Error(ErrorCode::kIo, command[0], "cannot be run");
  if (end.exit_code != 0) throw failure(folder.path(), end, config, request.ranks);
}

}  // namespace concerto
