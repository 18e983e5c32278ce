// For tests under mpirun: every process runs the same GoogleTest program (concerto_mpi_test in cmake), whose tests use
// this one world. A test that aborts it calls test_world().rebuild() at its end.
#pragma once

#include "concerto/comm/mpi/mpi_world.h"

namespace concerto {

MpiWorld& test_world();

}  // namespace concerto
