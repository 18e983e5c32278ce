// `concerto train`.
#pragma once

#include "concerto/comm/communicator.h"
#include "concerto/config/run_config.h"

namespace CLI {
class App;
}

namespace concerto {

void add_train_command(CLI::App& app);

// Trains as one rank of `world`, or alone (null), with so many threads, to the end or to a signal. StopSignals must be
// there. The first rank speaks.
void train_rank(const RunConfig& config, Communicator* world, int threads, bool json);

}  // namespace concerto
