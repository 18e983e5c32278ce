// The process around a rank's: a rank that is killed cannot say so, whoever waits for it can. `concerto launch` starts
// guards (over mpirun); each starts the rank, writes into the job's folder how it ended, and lets it outlive nobody.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace concerto {

// In the environment of the ranks that `concerto launch` starts: the folder of the job's files.
constexpr const char* kJobFolderVariable = "CONCERTO_JOB_FOLDER";

// What mpirun, srun or another starter of ranks says in the environment; one rank where there is none.
struct StartedRank {
  int rank = 0, ranks = 1;
};
StartedRank started_rank();

struct RankEnd {
  int rank = 0;
  int64_t unix_ns = 0;
  int exit_code = 0, signal = 0;
  bool failed() const { return exit_code != 0 || signal != 0; }
  int job_exit_code() const { return signal != 0 ? 128 + signal : exit_code; }
};

// Called by a process without threads. Goes on in a child, whose guard the process becomes: it passes signals on, ends
// the child when its own parent ends, and ends as the child does (128 + the signal's number if one killed it).
void guard_rank(const std::string& folder, int rank);

// How the ranks ended of which that is known, the first one first.
std::vector<RankEnd> read_rank_ends(const std::string& folder);

std::string signal_text(int signal);  // "signal 9 (SIGKILL)"

}  // namespace concerto
