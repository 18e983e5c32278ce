// Ranks as threads of one process: collectives read each other's memory.
#pragma once

#include <functional>
#include <memory>

#include "concerto/comm/communicator.h"

namespace concerto {

struct LocalOptions {
  double deadline_seconds = 60;        // of every wait
  uint64_t delay_seed = 0;             // tests: random delays before every operation; 0: none
  double most_delay_seconds = 0.0005;  // of one
};

// Runs body(world communicator) on `ranks` threads, and returns when all have ended. If one throws, the others' waits
// end, and the first error (of the rank that failed first, not of those that it took along) is thrown again, with "rank
// N" before its place.
void run_local_ranks(int ranks, const std::function<void(Communicator&)>& body, const LocalOptions& options = {});

}  // namespace concerto
