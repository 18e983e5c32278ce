// The one process that starts the ranks of a job as processes, passes signals on to them, and tells what became of them.
#pragma once

#include <string>
#include <vector>

#include "concerto/config/run_config.h"

namespace concerto {

struct JobRequest {
  std::string config;                  // the file
  std::vector<std::string> overrides;  // --section.key=value
  int ranks = 0;                       // 0: as many as the allocation has tasks
  std::string hostfile;                // empty: this machine, or what Slurm has given
  bool json = false;
};

// Where the job starts.
struct Surroundings {
  std::string program;       // this one, absolute
  std::string mpirun, srun;  // their paths; empty: not there
  bool root = false;
  bool slurm = false;  // inside an allocation
  int cores = 1;       // of this machine that may be used
};
Surroundings look_around();

// The command that starts the ranks, each with kJobFolderVariable in its environment. mpirun knows Slurm's nodes by itself;
// srun starts the ranks where there is no mpirun. Error(kUnsupported) if there is neither.
std::vector<std::string> job_command(const JobRequest& request, const Surroundings& around);

// How a command ended that was watched until then.
struct JobEnd {
  int exit_code = 0;
  bool quit = false;  // by a second Ctrl-C
  int signal = 0;     // the first that was passed on; 0: none
};

// Runs the command with `folder` in its environment, in a process group of its own that does not outlive this process.
// SIGTERM, SIGUSR1 and the first SIGINT ask the ranks to save and end (SIGUSR1 to `command`); a second SIGINT ends them at
// once. When a rank's guard (rank_guard.h) has told of a failure, all have ended `grace_seconds` later.
JobEnd run_job(const std::vector<std::string>& command, const std::string& folder, double grace_seconds = 3);

// Starts the ranks and returns when the run has ended well. Else JobError: which rank ended first, where it stands, in
// which action, and from where the same command goes on.
void supervise(const JobRequest& request, const RunConfig& config);

// "The same command goes on from checkpoint 400." or that it starts anew.
std::string how_to_go_on(const std::string& run_dir);

// A folder for the job's files that goes away with the object; in the run folder, which all machines see, or on this one.
class JobFolder {
 public:
  explicit JobFolder(const std::string& in);
  ~JobFolder();
  JobFolder(const JobFolder&) = delete;
  JobFolder& operator=(const JobFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace concerto
