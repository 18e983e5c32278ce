// In place of the MPI transport where its library is not installed.
#include "concerto/comm/mpi/mpi_world.h"

namespace concerto {

static void refuse() {
  throw Error(
      ErrorCode::kUnsupported, "mpi", "this build has no MPI",
      "Install libopenmpi-dev and openmpi-bin (scripts/install_deps.sh) and build again, or use ranks as threads.");
}

struct MpiWorld::State {};
MpiWorld::MpiWorld(const MpiOptions&) { refuse(); }
MpiWorld::~MpiWorld() = default;
Communicator& MpiWorld::communicator() { CHECK(false); }
void MpiWorld::rebuild(const MpiOptions&) { refuse(); }

void run_mpi_rank(const std::function<void(Communicator&)>&, const MpiOptions&) { refuse(); }
bool mpi_is_built() { return false; }
bool started_by_mpi() { return false; }

}  // namespace concerto
