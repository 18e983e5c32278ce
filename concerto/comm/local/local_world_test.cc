#include "concerto/comm/local/local_world.h"

#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <set>

#include "concerto/base/allocation_guard.h"
#include "concerto/base/clock.h"
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
  run_local_ranks(
      4,
      [&](Communicator& comm) {
        std::vector<float> a(1000), b(1000), c(50000), message(100), other(100);
        std::vector<View> a_parts, b_parts;
        std::vector<OwnedPiece> pieces;
        for (int r = 0; r < 4; ++r) {
          a_parts.push_back(part(a, part_of(1000, 4, r)));
          b_parts.push_back(part(b, part_of(1000, 4, comm.rank())));
          pieces.push_back({part(c, part_of(50000, 4, r)), r});
        }
        std::vector<float> incoming(1000 * 4);
        std::vector<View> incoming_parts;
        for (int r = 0; r < 4; ++r)
          incoming_parts.push_back(View(incoming.data() + r * 1000, Shape{part_of(1000, 4, r).count}, DType::kF32));
        const auto round = [&] {
          CommTicket owners = comm.start_reduce_to_owners(pieces);
          CommTicket gather = comm.start_all_gather(a_parts[at(comm.rank())], a_parts);
          CommTicket swap = comm.start_all_to_all(b_parts, incoming_parts);
          CommTicket send = comm.start_send(view(message), (comm.rank() + 1) % 4);
          CommTicket recv = comm.start_recv(view(other), (comm.rank() + 3) % 4);
          recv.wait(), swap.wait(), owners.wait(), gather.wait(), send.wait();
          comm.broadcast_from_owners(pieces);
          comm.barrier();
        };
        round();
        comm.barrier();
        if (comm.rank() == 0) AllocationGuard::reset();
        comm.barrier();
        const AllocationGuard guard;
        for (int i = 0; i < 20; ++i) round();
      },
      options);
  EXPECT_EQ(AllocationGuard::count(), 0) << AllocationGuard::first_stack();
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
