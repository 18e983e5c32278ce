#include "concerto/comm/local/local_world.h"

#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <set>

#include "concerto/base/clock.h"
#include "concerto/base/test_folder.h"
#include "concerto/comm/action_log.h"
#include "concerto/comm/transport_test.h"

namespace concerto {
namespace {

using namespace transport_test;

class LocalWorldTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, LocalWorldTest, testing::Values(1, 2, 3, 4, 5, 6, 7, 8, 9));

TEST_P(LocalWorldTest, Operations) { run_local_ranks(GetParam(), check_operations); }
TEST_P(LocalWorldTest, Split) { run_local_ranks(GetParam(), check_split); }

TEST(LocalWorld, ManyRanks) {
  const double begin = steady_seconds();
  std::atomic<int> done{0};
  run_local_ranks(96, [&](Communicator& comm) {
    check_all_to_all<float>(comm, 50);
    check_all_reduce<int64_t>(comm, 3);
    const auto row = comm.split(comm.rank() / 8, comm.rank(), "row");
    const auto column = comm.split(comm.rank() % 8, comm.rank(), "column");
    check_many_under_way(*row, *column);
    for (int i = 0; i < 20; ++i) comm.barrier();
    ++done;
  });
  EXPECT_EQ(done, 96);
  EXPECT_LT(steady_seconds() - begin, 60);
}

TEST(LocalWorld, RandomDelaysChangeNoBit) {
  std::mutex mutex;
  std::set<std::string> bits;
  for (const uint64_t seed : {0, 1, 2, 3, 4, 5}) {
    LocalOptions options;
    options.delay_seed = seed;
    options.most_delay_seconds = 0.002;
    run_local_ranks(
        5,
        [&](Communicator& comm) {
          const std::string mine = bits_of_sums(comm);
          const std::lock_guard lock(mutex);
          bits.insert(mine);
        },
        options);
  }
  EXPECT_EQ(bits.size(), 1u);
}

// Both ends stay at work elsewhere for a while after the start; whoever waits first gets its data.
TEST(LocalWorld, AWaitDoesTheWorkOfARankThatComputes) {
  std::atomic<bool> got{false};
  run_local_ranks(2, [&](Communicator& comm) {
    std::vector<float> values = draw<float>(4, comm.rank(), 100000), message(10);
    CommTicket sum = comm.start_all_reduce(view(values));
    CommTicket text = comm.rank() == 0 ? comm.start_send(view(message), 1) : comm.start_recv(view(message), 0);
    if (comm.rank() == 0) {
      while (!got) std::this_thread::yield();  // computes
    } else {
      sum.wait();
      text.wait();
      got = true;
    }
    sum.wait();
    text.wait();
    EXPECT_TRUE(same_bits(values, sum_of_ranks<float>(4, 2, 100000)));
  });
}

TEST(LocalWorld, AllocatesNothingFromTheSecondRoundOn) {
  LocalOptions options;
  options.delay_seed = 3;
  run_local_ranks(4, check_allocations, options);
}

TEST(LocalWorld, OperationsStandInTheLastActions) {
  const TestFolder folder;
  run_local_ranks(3, [&](Communicator& comm) {
    ActionLog log(folder.path(), comm.rank(), "");
    const ActionLogScope scope(&log);
    check_send_recv(comm);
    log.set_step(4);
    const CommScope action("count", 2, 1);
    comm.barrier();
  });
  const LastActions actions = read_last_actions(ActionLog::path(folder.path(), 1));
  EXPECT_EQ(actions.last(), "step 4: has done world barrier, number 1 (count of layer 1, micro-batch 2)");
  EXPECT_EQ(actions.records[0].text(), "has started world send to rank 2, number 1");
  EXPECT_EQ(actions.records[1].text(), "has started world recv from rank 0, number 1");
}

TEST(LocalWorld, CountsBytesAndOperations) {
  run_local_ranks(4, [](Communicator& comm) {
    std::vector<float> values(10);
    comm.all_reduce(view(values));
    const int64_t own = part_of(10, 4, comm.rank()).count;
    EXPECT_EQ(comm.traffic().all_reduce, (10 - own + 3 * own) * 4);
    std::vector<OwnedPiece> pieces = {{view(values), 1}, {view(values), 2}};
    comm.reduce_to_owners(pieces, Wire::kBF16);
    EXPECT_EQ(comm.traffic().reduce_to_owners, comm.rank() == 1 || comm.rank() == 2 ? 20 : 40);
    comm.broadcast_from_owners(pieces);
    EXPECT_EQ(comm.traffic().broadcast_from_owners, comm.rank() == 1 || comm.rank() == 2 ? 120 : 0);
    EXPECT_EQ(comm.traffic().operations, 3);
  });
}

}  // namespace
}  // namespace concerto
