#include "concerto/comm/mpi/mpi_world.h"

#include <gtest/gtest.h>

#include "concerto/base/test_folder.h"
#include "concerto/comm/action_log.h"
#include "concerto/comm/local/local_world.h"
#include "concerto/comm/mpi/test_mpi.h"
#include "concerto/comm/transport_test.h"

namespace concerto {
namespace {

using namespace transport_test;

TEST(MpiWorld, Operations) { check_operations(test_world().communicator()); }
TEST(MpiWorld, Split) { check_split(test_world().communicator()); }

TEST(MpiWorld, LongMessagesGoInPieces) {
  MpiOptions options;
  options.most_message_bytes = 1000;
  test_world().rebuild(options);
  check_operations(test_world().communicator());
  check_split(test_world().communicator());
  test_world().rebuild({});
}

TEST(MpiWorld, TheSameBitsAsOnThreads) {
  const std::string mine = bits_of_sums(test_world().communicator());
  run_local_ranks(test_world().communicator().size(), [&](Communicator& comm) { EXPECT_EQ(bits_of_sums(comm), mine); });
}

TEST(MpiWorld, RandomDelaysChangeNoBit) {
  const std::string bits = bits_of_sums(test_world().communicator());
  for (const uint64_t seed : {1, 2, 3}) {
    MpiOptions options;
    options.delay_seed = seed;
    options.most_delay_seconds = 0.003;
    test_world().rebuild(options);
    EXPECT_EQ(bits_of_sums(test_world().communicator()), bits);
  }
  test_world().rebuild({});
}

TEST(MpiWorld, AllocatesNothingFromTheSecondRoundOn) {
  MpiOptions options;
  options.watch_seconds = 100;  // under load a wait may be long, and then it asks the others
  test_world().rebuild(options);
  AllocationGuard::reset();
  check_allocations(test_world().communicator());
  test_world().rebuild({});
}

TEST(MpiWorld, LargeSums) {
  Communicator& comm = test_world().communicator();
  check_all_reduce<float>(comm, 1 << 20);
  check_reduce_scatter<float>(comm, (1 << 20) + 7, Wire::kBF16);
  check_all_to_all<double>(comm, 100000);
}

// More operations than there are tags under way at once, and longer than the history of the watch.
TEST(MpiWorld, ManyOperations) {
  Communicator& comm = test_world().communicator();
  for (int i = 0; i < 1100; ++i) {
    std::vector<int64_t> value = {comm.rank() + i};
    comm.all_reduce(view(value));
    ASSERT_EQ(value[0], int64_t{comm.size()} * i + comm.size() * (comm.size() - 1) / 2);
  }
}

TEST(MpiWorld, OperationsStandInTheLastActions) {
  const TestFolder folder;
  Communicator& comm = test_world().communicator();
  ActionLog log(folder.path(), comm.rank(), "");
  const ActionLogScope scope(&log);
  comm.barrier();
  const std::string last = read_last_actions(ActionLog::path(folder.path(), comm.rank())).last();
  EXPECT_EQ(last.rfind("has done world barrier, number ", 0), 0u) << last;
}

TEST(MpiWorld, CountsTheSameBytesAsOnThreads) {
  const auto count = [](Communicator& comm) {
    const Communicator::Traffic before = comm.traffic();
    check_owners<float>(comm, Wire::kBF16);
    check_all_reduce<float>(comm, 1001);
    check_all_gather<bf16>(comm, 55);
    const Communicator::Traffic& after = comm.traffic();
    return std::vector<int64_t>{after.reduce_to_owners - before.reduce_to_owners,
                                after.broadcast_from_owners - before.broadcast_from_owners,
                                after.all_reduce - before.all_reduce, after.all_gather - before.all_gather,
                                after.operations - before.operations};
  };
  Communicator& world = test_world().communicator();
  const std::vector<int64_t> mine = count(world);
  run_local_ranks(world.size(), [&](Communicator& comm) {
    const std::vector<int64_t> here = count(comm);
    if (comm.rank() == world.rank()) {
      EXPECT_EQ(here, mine);
    }
  });
}

}  // namespace
}  // namespace concerto
