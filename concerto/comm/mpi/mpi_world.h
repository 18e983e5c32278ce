// Ranks as processes that MPI has started (mpirun, srun), on one host or many. Started without either, a process is a
// world of one rank.
//
// An MPI process that ends without MPI_Finalize is ended with all its peers by mpirun: that is what happens after an
// abort, so that a rank that hangs elsewhere ends too.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "concerto/comm/communicator.h"

namespace concerto {

struct MpiOptions {
  double deadline_seconds = 60;          // of every wait
  double watch_seconds = 0.5;            // a wait that is longer compares with its peers what they are doing
  int64_t most_message_bytes = 1 << 30;  // longer ones go in pieces: MPI counts in int
  uint64_t delay_seed = 0;               // tests, as LocalOptions
  double most_delay_seconds = 0.0005;
};

// One a process. Error(kUnsupported) in a build without MPI.
class MpiWorld {
 public:
  // Starts MPI. Error(kComm) when Slurm has started several ranks and MPI knows of none of them (no PMI).
  explicit MpiWorld(const MpiOptions& options = {});
  ~MpiWorld();  // all groups must be gone
  MpiWorld(const MpiWorld&) = delete;
  MpiWorld& operator=(const MpiWorld&) = delete;

  Communicator& communicator();
  // Called by all ranks when their groups and tickets are gone, also after an abort: as if just made.
  void rebuild(const MpiOptions& options);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Makes a world and runs body(world communicator). When it throws, the others end, and its error is thrown again with
// "rank N" before its place. A rank that was taken along stays a while, so that the first one's exit code and message
// are the job's, and then throws its PeerError.
void run_mpi_rank(const std::function<void(Communicator&)>& body, const MpiOptions& options = {});

bool mpi_is_built();
// Has mpirun, or srun with PMI, started this process?
bool started_by_mpi();

}  // namespace concerto
