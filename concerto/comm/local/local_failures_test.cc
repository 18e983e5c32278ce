// Ranks that disagree, do not come, leave or fail.
#include <gtest/gtest.h>

#include <mutex>
#include <thread>
#include <vector>

#include "concerto/base/clock.h"
#include "concerto/base/test_errors.h"
#include "concerto/comm/local/local_world.h"
#include "concerto/comm/transport_test.h"

namespace concerto {
namespace {

using namespace transport_test;

LocalOptions deadline(double seconds) {
  LocalOptions options;
  options.deadline_seconds = seconds;
  return options;
}

// The Error(kComm) of each rank; empty where it had none.
template <class Body>
std::vector<std::string> errors_of(int ranks, Body&& body, const LocalOptions& options = deadline(20)) {
  std::vector<std::string> errors(at(ranks));
  const double begin = steady_seconds();
  run_local_ranks(
      ranks,
      [&](Communicator& comm) {
        try {
          body(comm);
        } catch (const Error& e) {
          EXPECT_EQ(e.code, ErrorCode::kComm) << e.what();
          errors[at(comm.rank())] = e.what();
        }
      },
      options);
  EXPECT_LT(steady_seconds() - begin, 15);
  return errors;
}

void expect_all_have(const std::vector<std::string>& errors, const std::vector<std::string>& parts) {
  for (size_t r = 0; r < errors.size(); ++r)
    for (const std::string& part : parts)
      EXPECT_NE(errors[r].find(part), std::string::npos) << "rank " << r << ": " << errors[r];
}

TEST(LocalFailures, OtherOperations) {
  const auto errors = errors_of(4, [](Communicator& comm) {
    std::vector<float> values(10);
    comm.barrier();
    const CommScope scope("dispatch", 5, 3);
    if (comm.rank() == 2)
      comm.barrier();
    else
      comm.all_reduce(view(values));
  });
  expect_all_have(errors, {"world all_reduce, number 2", "rank 2", "world barrier, number 2",
                           "dispatch of layer 3, micro-batch 5", "same operations in the same order"});
}

TEST(LocalFailures, OtherSizes) {
  std::vector<std::function<void(Communicator&)>> bodies;
  bodies.push_back([](Communicator& comm) {
    std::vector<float> values(comm.rank() == 2 ? 11 : 10);
    comm.all_reduce(view(values));
  });
  bodies.push_back([](Communicator& comm) {
    std::vector<float> values(comm.rank() == 2 ? 11 : 10), all(30);
    const std::vector<View> parts = {part(all, {0, 10}), part(all, {10, 10}),
                                     part(all, {20, comm.rank() == 2 ? 11 : 10})};
    comm.all_gather(view(values), parts);
  });
  bodies.push_back([](Communicator& comm) {
    std::vector<float> to(11), from(30);
    const std::vector<View> parts = {part(from, {0, 10}), part(from, {10, 10}), part(from, {20, 10})};
    const std::vector<View> mine(3, part(to, {0, comm.rank() == 2 ? 11 : 10}));
    if (comm.rank() == 2) {
      std::vector<float> own(11);
      const std::vector<View> places = {parts[0], parts[1], view(own)};
      comm.all_to_all(mine, places);
    } else {
      comm.all_to_all(mine, parts);
    }
  });
  bodies.push_back([](Communicator& comm) {
    std::vector<float> values(40), out(10);
    std::vector<View> parts = {part(values, {0, 10}), part(values, {10, comm.rank() == 2 ? 11 : 10}),
                               part(values, {30, 10})};
    comm.reduce_scatter(parts, view(out));
  });
  bodies.push_back([](Communicator& comm) {
    std::vector<float> values(11);
    const std::vector<OwnedPiece> pieces = {{part(values, {0, comm.rank() == 2 ? 11 : 10}), 1}};
    comm.broadcast_from_owners(pieces);
  });
  for (size_t i = 0; i < bodies.size(); ++i) {
    SCOPED_TRACE(i);
    expect_all_have(errors_of(3, bodies[i]), {"rank 2 has", "11 x f32", "10 x f32"});
  }
}

TEST(LocalFailures, OtherTypesOwnersWiresAndNames) {
  expect_all_have(errors_of(3,
                            [](Communicator& comm) {
                              std::vector<float> a(10);
                              std::vector<int32_t> b(10);
                              comm.all_reduce(comm.rank() == 1 ? view(b) : view(a));
                            }),
                  {"10 x f32", "rank 1 has 10 x i32"});
  expect_all_have(errors_of(3,
                            [](Communicator& comm) {
                              std::vector<float> a(10);
                              const std::vector<OwnedPiece> pieces = {{view(a), comm.rank() == 1 ? 1 : 0}};
                              comm.reduce_to_owners(pieces);
                            }),
                  {"the owner of piece 0"});
  expect_all_have(errors_of(3,
                            [](Communicator& comm) {
                              std::vector<float> a(10);
                              const std::vector<OwnedPiece> pieces(comm.rank() == 1 ? 2 : 1, {view(a), 0});
                              comm.reduce_to_owners(pieces);
                            }),
                  {"rank 1 2"});
  expect_all_have(errors_of(3,
                            [](Communicator& comm) {
                              std::vector<float> a(10);
                              const std::vector<OwnedPiece> pieces = {{view(a), 0}};
                              comm.reduce_to_owners(pieces, comm.rank() == 1 ? Wire::kBF16 : Wire::kAsIs);
                            }),
                  {"ranks 0 and 1 send in other types"});
  expect_all_have(errors_of(3, [](Communicator& comm) { comm.split(0, 0, comm.rank() == 1 ? "ep" : "tp"); }),
                  {"calls the group tp, rank 1 ep"});
  expect_all_have(errors_of(2,
                            [](Communicator& comm) {
                              std::vector<float> a(10), b(11);
                              if (comm.rank() == 0)
                                comm.send(view(a), 1);
                              else
                                comm.recv(view(b), 0);
                            }),
                  {"10 x f32", "11 x f32", "world send to rank 1, number 1", "world recv from rank 0, number 1"});
}

TEST(LocalFailures, ASilentPeerIsNamedAtTheDeadline) {
  const auto errors = errors_of(
      4,
      [](Communicator& comm) {
        const auto tp = comm.split(comm.rank() % 2, 0, "tp");  // 0 2, and 1 3
        std::vector<float> values(10);
        tp->all_reduce(view(values));
        const CommScope scope("combine", 7, 2);
        if (comm.rank() == 3) std::this_thread::sleep_for(std::chrono::milliseconds(3000));
        tp->all_reduce(view(values));
        if (comm.rank() != 1) std::this_thread::sleep_for(std::chrono::milliseconds(750));
        comm.barrier();
      },
      deadline(1));
  EXPECT_HAS(errors[1], "tp all_reduce, number 2 (combine of layer 2, micro-batch 7)");
  EXPECT_HAS(errors[1], "waited 1 s in vain: rank 3 has not come (came last to tp all_reduce, number 1)");
  expect_all_have(errors, {"waited 1 s in vain"});
}

TEST(LocalFailures, PatienceMovesTheDeadlineOfItsThread) {
  const auto errors = errors_of(
      2,
      [](Communicator& comm) {
        {
          const CommPatience patience(10);
          const CommPatience less(1);
          EXPECT_EQ(CommPatience::seconds(), 10);
          if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
          comm.barrier();
        }
        EXPECT_EQ(CommPatience::seconds(), 0);
        if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
        comm.barrier();
      },
      deadline(0.5));
  EXPECT_HAS(errors[0], "barrier, number 2: waited 0.5 s in vain");
}

// Who waits elsewhere is told from who hangs.
TEST(LocalFailures, AWaitingPeerIsToldFromAHangingOne) {
  const auto errors = errors_of(
      3,
      [](Communicator& comm) {
        const auto pair = comm.split(comm.rank() == 0 ? -1 : 0, 0, "pair");
        if (comm.rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(2500));
        const CommScope scope("gather", 7, 2);
        if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(500));
        if (comm.rank() != 0) pair->barrier();
        comm.barrier();
      },
      deadline(1));
  EXPECT_HAS(errors[0],
             "rank 1 has not come (waits in pair barrier, number 1, in gather of layer 2, micro-batch 7); rank 2 has "
             "not come (came last to world split, number 1)");
}

TEST(LocalFailures, ASilentSenderIsNamed) {
  const auto errors = errors_of(
      3,
      [](Communicator& comm) {
        std::vector<float> values(10);
        if (comm.rank() == 0) comm.recv(view(values), 1);
        if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      },
      deadline(0.5));
  EXPECT_HAS(errors[0], "world recv from rank 1, number 1: waited 0.5 s in vain: rank 1 has not come");
  EXPECT_EQ(errors[2], "");
}

TEST(LocalFailures, ARankThatHasEndedIsNotWaitedFor) {
  const auto errors = errors_of(3, [](Communicator& comm) {
    if (comm.rank() != 1) comm.barrier();
  });
  EXPECT_HAS(errors[0], "rank 1 has ended");
  EXPECT_EQ(errors[1], "");
  EXPECT_HAS(errors[2], "rank 1 has ended");
}

TEST(LocalFailures, AbortEndsAllGroupsWithItsReason) {
  const auto errors = errors_of(6, [](Communicator& comm) {
    const auto pair = comm.split(comm.rank() / 2, 0, "pair");
    std::vector<float> values(10);
    if (comm.rank() == 5) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      comm.abort("the disk is full");
      return;
    }
    if (comm.rank() < 2) {  // never comes together
      if (comm.rank() == 0) pair->recv(view(values), 1);
      comm.barrier();
    }
    pair->all_reduce(view(values));
    comm.barrier();
  });
  for (int r = 0; r < 5; ++r) EXPECT_HAS(errors[at(r)], "rank 5 ended the job: the disk is full") << r;
  EXPECT_EQ(errors[5], "");
}

TEST(LocalFailures, NothingWorksAfterAnAbort) {
  const auto errors = errors_of(2, [](Communicator& comm) {
    comm.abort("enough");
    comm.barrier();
  });
  expect_all_have(errors, {"world barrier: rank", "ended the job: enough"});
  run_local_ranks(2, check_send_recv);  // another world is another matter
}

TEST(LocalFailures, TheFirstErrorIsThrownAgain) {
  const double begin = steady_seconds();
  expect_error(ErrorCode::kData, {"rank 2: data/a.bin: cut short"}, [] {
    run_local_ranks(4, [](Communicator& comm) {
      comm.barrier();
      if (comm.rank() == 2) throw Error(ErrorCode::kData, "data/a.bin", "cut short");
      comm.barrier();
    });
  });
  EXPECT_LT(steady_seconds() - begin, 5);
  try {
    run_local_ranks(3, [](Communicator& comm) {
      CHECK(comm.rank() != 1, "no");
      comm.barrier();
    });
    FAIL();
  } catch (const Bug& e) {
    EXPECT_HAS(std::string(e.what()), "rank 1: internal error");
  }
  EXPECT_THROW(run_local_ranks(2,
                               [](Communicator& comm) {
                                 if (comm.rank() == 1) throw std::bad_alloc();
                                 comm.barrier();
                               }),
               std::bad_alloc);
  expect_error(ErrorCode::kComm, {"rank 1 ended the job: gone"}, [] {
    run_local_ranks(2, [](Communicator& comm) {
      if (comm.rank() == 1) return comm.abort("gone");
      comm.barrier();
    });
  });
}

// A rank leaves by an exception while its operation is under way: the others end, and touch its memory no more (what
// the address sanitizer sees).
TEST(LocalFailures, AnExceptionEndsOperationsUnderWay) {
  for (int i = 0; i < 20; ++i) {
    expect_error(ErrorCode::kNumeric, {"rank 1: loss: nan"}, [] {
      run_local_ranks(4, [](Communicator& comm) {
        std::vector<float> values(100000);
        CommTicket ticket = comm.start_all_reduce(view(values));
        if (comm.rank() == 1) throw Error(ErrorCode::kNumeric, "loss", "nan");
        ticket.wait();
        comm.barrier();
      });
    });
  }
}

TEST(LocalFailures, ATicketDroppedUnderWayAborts) {
  const auto errors = errors_of(2, [](Communicator& comm) {
    std::vector<float> values(10);
    if (comm.rank() == 0) {
      CommTicket ticket = comm.start_all_reduce(view(values));
      ticket = CommTicket();
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      comm.barrier();
    }
  });
  EXPECT_EQ(errors[0], "");
  EXPECT_HAS(errors[1], "rank 0 ended the job: world all_reduce, number 1: left before its end");
}

TEST(LocalFailures, WrongArgumentsAreBugs) {
  std::vector<float> values(12);
  const View strided = View(values.data(), Shape{3, 4}, DType::kF32).cols_range(0, 2);
  const auto refused = [](const std::function<void(Communicator&)>& body) {
    EXPECT_THROW(run_local_ranks(2, body), Bug);
  };
  refused([&](Communicator& comm) { comm.all_reduce(strided); });
  refused([&](Communicator& comm) { comm.all_reduce(View(nullptr, Shape{2}, DType::kF32)); });
  refused([&](Communicator& comm) { comm.all_reduce(View(values.data(), Shape{2}, DType::kU8)); });
  refused([&](Communicator& comm) { comm.send(view(values), comm.rank()); });
  refused([&](Communicator& comm) { comm.recv(view(values), 2); });
  refused([&](Communicator& comm) { comm.all_gather(view(values), std::vector<View>(1)); });
  refused([&](Communicator& comm) { comm.reduce_scatter(std::vector<View>(2, view(values)), View()); });
  refused([&](Communicator& comm) { comm.broadcast_from_owners(std::vector<OwnedPiece>{{view(values), 2}}); });
}

}  // namespace
}  // namespace concerto
