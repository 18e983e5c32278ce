// The first exchange of a job's ranks: whether they mean the same job, and who shares a machine.
#pragma once

#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "concerto/comm/communicator.h"
#include "concerto/config/run_config.h"

namespace concerto {

// Version and build of this program.
std::string program_identity();

// The settings that all ranks of a job share: all but the machine's part (threads, cores).
std::vector<std::pair<std::string, std::string>> shared_settings(const RunConfig& config);

// `fault`: what kept this rank from having a config, or null. The first rank that has one throws it; the others end with
// it.
void agree_on_start(Communicator& world, const std::exception_ptr& fault);

// Error(kConfig), from rank 0, that names the ranks which run another program or have other settings than rank 0, and what
// differs. `settings`: key and text.
void check_same_job(Communicator& world, const std::string& program,
                    const std::vector<std::pair<std::string, std::string>>& settings);

// The ranks that may use the same processors of the same machine: how many, and which of them this one is.
struct MachineShare {
  int ranks = 1, index = 0;
};
MachineShare machine_share(Communicator& world);

}  // namespace concerto
