// Ranks that disagree, do not come or fail; after each, a new world works.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "concerto/base/clock.h"
#include "concerto/base/test_errors.h"
#include "concerto/comm/mpi/test_mpi.h"
#include "concerto/comm/transport_test.h"

namespace concerto {
namespace {

using namespace transport_test;

class MpiFailures : public testing::Test {
 protected:
  void SetUp() override {
    if (test_world().communicator().size() == 1) GTEST_SKIP() << "takes two";
  }
  // The Error(kComm) of this rank's body in a world of these options, and how long it took. Then all ranks leave, and a
  // new world works.
  template <class Body>
  std::string error_of(const MpiOptions& options, Body&& body) {
    test_world().rebuild(options);
    std::string error;
    const double begin = steady_seconds();
    try {
      body(test_world().communicator());
    } catch (const Error& e) {
      EXPECT_EQ(e.code, ErrorCode::kComm) << e.what();
      error = e.what();
    }
    seconds_ = steady_seconds() - begin;
    test_world().rebuild({});
    check_send_recv(test_world().communicator());
    check_all_reduce<float>(test_world().communicator(), 1000);
    return error;
  }
  static MpiOptions quick(double deadline = 20) {
    MpiOptions options;
    options.watch_seconds = 0.1;
    options.deadline_seconds = deadline;
    return options;
  }
  static int last(Communicator& comm) { return comm.size() - 1; }
  double seconds_ = 0;
};

TEST_F(MpiFailures, OtherOperations) {
  const std::string error = error_of(quick(), [](Communicator& comm) {
    std::vector<float> values(10);
    comm.barrier();
    const CommScope scope("dispatch", 5, 3);
    if (comm.rank() == last(comm))
      comm.barrier();
    else
      comm.all_reduce(view(values));
    comm.barrier();
  });
  EXPECT_HAS(error, "world all_reduce, number 2 (dispatch of layer 3, micro-batch 5)");
  EXPECT_HAS(error, "world barrier, number 2 (dispatch of layer 3, micro-batch 5)");
  EXPECT_LT(seconds_, 10);
}

TEST_F(MpiFailures, OtherSizes) {
  for (const int64_t more : {1, -1}) {
    const std::string error = error_of(quick(), [&](Communicator& comm) {
      std::vector<float> values(at(1000 + (comm.rank() == last(comm) ? more : 0)));
      comm.all_reduce(view(values));
      comm.all_reduce(view(values));
      comm.barrier();
    });
    EXPECT_HAS(error, "world ");
    EXPECT_HAS(error, "same");
    EXPECT_LT(seconds_, 10);
  }
}

TEST_F(MpiFailures, AMessageOfAnotherSize) {
  for (const int64_t more : {1, -1}) {
    const std::string error = error_of(quick(), [&](Communicator& comm) {
      std::vector<float> values(at(1000 + more)), in(1000);
      if (comm.rank() == 0) comm.send(view(values), last(comm));
      if (comm.rank() == last(comm)) comm.recv(view(in), 0);
      comm.barrier();
    });
    EXPECT_HAS(error, "world recv from rank 0, number 1");
    EXPECT_HAS(error, "4000");
    EXPECT_LT(seconds_, 10);
  }
}

TEST_F(MpiFailures, OwnersThatDiffer) {
  const std::string error = error_of(quick(), [](Communicator& comm) {
    std::vector<float> values(10);
    const std::vector<OwnedPiece> pieces = {{view(values), comm.rank() == last(comm) ? 1 : 0}};
    comm.broadcast_from_owners(pieces);
    comm.barrier();
  });
  EXPECT_HAS(error, "owners");
  EXPECT_HAS(error, "same");
}

// Both are content with what they got: the barrier finds it.
TEST_F(MpiFailures, ADifferenceThatNobodyFeels) {
  const std::string error = error_of(quick(), [](Communicator& comm) {
    std::vector<float> values(10);
    const std::vector<OwnedPiece> pieces(comm.rank() == last(comm) ? 2 : 1, {View(), 0});
    comm.broadcast_from_owners(pieces);
    comm.barrier();
    comm.barrier();
  });
  EXPECT_HAS(error, "world barrier, number 2");
  EXPECT_HAS(error, "not the same as here");
}

TEST_F(MpiFailures, NamesThatDiffer) {
  const std::string error = error_of(quick(), [](Communicator& comm) {
    const auto group = comm.split(0, 0, comm.rank() == last(comm) ? "ep" : "tp");
    group->barrier();
  });
  EXPECT_HAS(error, "by several names");
}

TEST_F(MpiFailures, ASilentPeerIsNamedAtTheDeadline) {
  const int silent = last(test_world().communicator());
  const std::string error = error_of(quick(2), [&](Communicator& comm) {
    std::vector<float> values(10);
    comm.all_reduce(view(values));
    const CommScope scope("combine", 7, 2);
    if (comm.rank() == silent) std::this_thread::sleep_for(std::chrono::milliseconds(4500));
    comm.all_reduce(view(values));
  });
  EXPECT_HAS(error, "world all_reduce, number 2 (combine of layer 2, micro-batch 7)");
  EXPECT_HAS(error, "waited 2 s in vain");
  EXPECT_HAS(error, fmt::format("rank {} has not come (it does not answer", silent));
}

TEST_F(MpiFailures, AWaitingPeerIsToldFromAHangingOne) {
  if (test_world().communicator().size() < 3) GTEST_SKIP() << "takes three";
  MpiOptions options = quick(2);  // wide, so that a loaded machine sees the same order
  options.watch_seconds = 0.4;
  const std::string error = error_of(options, [](Communicator& comm) {
    const auto pair = comm.split(comm.rank() == 0 ? -1 : 0, 0, "others");
    if (comm.rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(3500));
    const CommScope scope("gather", 7, 2);
    if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(800));
    if (comm.rank() != 0) pair->barrier();
    comm.barrier();
  });
  EXPECT_HAS(error, "rank 1 has not come (waits in others barrier, number 1 (gather of layer 2, micro-batch 7))");
  EXPECT_HAS(error, "rank 2 has not come (it does not answer");
}

TEST_F(MpiFailures, AbortEndsAllGroupsWithItsReason) {
  const int failing = last(test_world().communicator());
  const std::string error = error_of(quick(), [&](Communicator& comm) {
    const auto pair = comm.split(comm.rank() / 2, 0, "pair");
    std::vector<float> values(100000);
    if (comm.rank() == failing) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      comm.abort("the disk is full");
      return;
    }
    CommTicket under_way = comm.start_all_reduce(view(values));
    pair->barrier();
    under_way.wait();
  });
  if (test_world().communicator().rank() != failing) {
    EXPECT_HAS(error, fmt::format("rank {} ended the job: the disk is full", failing));
  }
  EXPECT_LT(seconds_, 10);
}

TEST_F(MpiFailures, ATicketDroppedUnderWayAborts) {
  const std::string error = error_of(quick(), [](Communicator& comm) {
    std::vector<float> values(10);
    if (comm.rank() == 0) {
      const CommTicket ticket = comm.start_all_reduce(view(values));
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    comm.all_reduce(view(values));
    comm.barrier();
  });
  if (test_world().communicator().rank() != 0) {
    EXPECT_HAS(error, "rank 0 ended the job: world all_reduce, number 1: left before its end");
  }
}

TEST_F(MpiFailures, NothingWorksAfterAnAbort) {
  const std::string error = error_of(quick(), [](Communicator& comm) {
    comm.barrier();
    comm.abort("enough");
    comm.barrier();
  });
  EXPECT_HAS(error, "ended the job: enough");
}

}  // namespace
}  // namespace concerto
