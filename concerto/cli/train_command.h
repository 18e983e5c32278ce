// `concerto train`.
#pragma once

#include <vector>

#include "concerto/cli/rank_agreement.h"
#include "concerto/comm/communicator.h"
#include "concerto/config/run_config.h"

namespace CLI {
class App;
}

namespace concerto {

void add_train_command(CLI::App& app);

// What a rank computes with: so many threads (0: ThreadPool's default), each pinned to a core if there are any.
struct RankThreads {
  int count = 0;
  std::vector<int> cores;
};
// Its share of the machine: run.threads are each rank's, run.cores are dealt to the ranks of a machine, and without
// either the processors that may be used are.
RankThreads rank_threads(const RunConfig& config, const MachineShare& share);

// Trains as one rank of `world`, or alone (null), to the end or to a signal. StopSignals must be there. The first rank
// speaks. With kJobFolderVariable in the environment its last actions are there for others to read.
void train_rank(const RunConfig& config, Communicator* world, const RankThreads& threads, bool json);

}  // namespace concerto
