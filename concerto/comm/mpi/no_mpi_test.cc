#include <gtest/gtest.h>

#include "concerto/base/test_errors.h"
#include "concerto/comm/mpi/mpi_world.h"

namespace concerto {
namespace {

TEST(NoMpi, SaysHowToGetIt) {
  EXPECT_FALSE(mpi_is_built());
  EXPECT_FALSE(started_by_mpi());
  expect_error(ErrorCode::kUnsupported, {"no MPI", "libopenmpi-dev"}, [] { MpiWorld world; });
  expect_error(ErrorCode::kUnsupported, {"no MPI"}, [] { run_mpi_rank([](Communicator&) {}); });
}

}  // namespace
}  // namespace concerto
