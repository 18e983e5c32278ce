// For tests: rank 1 fails while the others wait for it.
#include <cstdio>

#include "concerto/comm/mpi/mpi_world.h"

int main() {
  using namespace concerto;
  try {
    run_mpi_rank([](Communicator& comm) {
      comm.barrier();
      if (comm.rank() == 1) throw Error(ErrorCode::kData, "data/a.bin", "cut short");
      comm.barrier();
    });
  } catch (const PeerError& e) {
    return static_cast<int>(e.code);  // the other speaks
  } catch (const Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return static_cast<int>(e.code);
  }
  return 0;
}
