#include "concerto/cli/rank_guard.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "concerto/base/files.h"

namespace concerto {
namespace {

constexpr const char* kEnd = ".end";

int number(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text ? std::atoi(text) : otherwise;
}

sigset_t guarded_signals() {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int s : {SIGCHLD, SIGTERM, SIGINT, SIGUSR1, SIGHUP}) ::sigaddset(&set, s);
  return set;
}

void write_end(const std::string& folder, int rank, int status) {
  const int64_t now =
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  try {
    write_file_atomic(fmt::format("{}/rank-{}{}", folder, rank, kEnd),
                      fmt::format("{} {} {} {}\n", rank, now, WIFEXITED(status) ? WEXITSTATUS(status) : 0,
                                  WIFSIGNALED(status) ? WTERMSIG(status) : 0));
  } catch (const Error&) {  // a full disk; the exit code says it too
  }
}

[[noreturn]] void guard(const std::string& folder, int rank, pid_t child, pid_t parent, const sigset_t& signals) {
  const timespec while_nothing{0, 200'000'000};
  bool orphan = false;
  for (;;) {
    const int signal = ::sigtimedwait(&signals, nullptr, &while_nothing);
    if (signal > 0 && signal != SIGCHLD) ::kill(child, signal);
    if (!orphan && ::getppid() != parent) {
      orphan = true;
      ::kill(child, SIGKILL);
    }
    int status = 0;
    if (::waitpid(child, &status, WNOHANG) != child || (!WIFEXITED(status) && !WIFSIGNALED(status))) continue;
    if (!orphan) write_end(folder, rank, status);
    ::_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  }
}

}  // namespace

StartedRank started_rank() {
  for (const auto& [rank, ranks] :
       {std::pair{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}, std::pair{"PMI_RANK", "PMI_SIZE"},
        std::pair{"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"}})
    if (std::getenv(ranks)) return {number(rank, 0), std::max(1, number(ranks, 1))};
  return {};
}

void guard_rank(const std::string& folder, int rank) {
  const pid_t parent = ::getppid(), self = ::getpid();
  const sigset_t signals = guarded_signals();
  sigset_t before;
  ::sigprocmask(SIG_BLOCK, &signals, &before);
  const pid_t child = ::fork();
  if (child < 0)
    throw Error(ErrorCode::kIo, "fork", fmt::format("cannot start the rank's process: {}", std::strerror(errno)));
  if (child > 0) guard(folder, rank, child, parent, signals);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != self) ::_exit(1);  // the guard is gone already
  ::sigprocmask(SIG_SETMASK, &before, nullptr);
}

std::vector<RankEnd> read_rank_ends(const std::string& folder) {
  std::vector<RankEnd> ends;
  for (const std::string& name : list_directory(folder)) {
    if (!name.ends_with(kEnd)) continue;
    RankEnd end;
    long long when = 0;
    if (std::sscanf(read_text_file(folder + "/" + name).c_str(), "%d %lld %d %d", &end.rank, &when, &end.exit_code,
                    &end.signal) != 4)
      continue;
    end.unix_ns = when;
    ends.push_back(end);
  }
  std::sort(ends.begin(), ends.end(), [](const RankEnd& a, const RankEnd& b) { return a.unix_ns < b.unix_ns; });
  return ends;
}

std::string signal_text(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name ? fmt::format("signal {} (SIG{})", signal, name) : fmt::format("signal {}", signal);
}

}  // namespace concerto
