#include "concerto/comm/local/local_world.h"

#include <exception>
#include <numeric>
#include <thread>
#include <vector>

#include "concerto/comm/local/local_communicator.h"

namespace concerto {
namespace {

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

[[noreturn]] void rethrow_of_rank(int rank, const std::exception_ptr& error) {
  const std::string name = fmt::format("rank {}", rank);
  try {
    std::rethrow_exception(error);
  } catch (const PeerError&) {
    throw;  // it names the rank that matters
  } catch (const Error& e) {
    throw Error(e.code, e.where.empty() ? name : name + ": " + e.where, e.problem, e.fix);
  } catch (const Bug& e) {
    throw Bug(name + ": " + e.what());
  }
}

// The error of the rank that ended the job; if it threw none (it called abort() and went), that of any it took along.
void rethrow_first(const std::vector<std::exception_ptr>& errors, int aborted_by) {
  if (aborted_by < 0) return;
  if (errors[static_cast<size_t>(aborted_by)]) rethrow_of_rank(aborted_by, errors[static_cast<size_t>(aborted_by)]);
  for (size_t r = 0; r < errors.size(); ++r)
    if (errors[r]) rethrow_of_rank(static_cast<int>(r), errors[r]);
}

}  // namespace

void run_local_ranks(int ranks, const std::function<void(Communicator&)>& body, const LocalOptions& options) {
  CHECK(ranks >= 1, "{} ranks", ranks);
  const auto world = std::make_shared<WorldState>(ranks, options);
  std::vector<int> all(static_cast<size_t>(ranks));
  std::iota(all.begin(), all.end(), 0);
  auto group = std::make_shared<LocalGroup>(world, "world", all);

  std::vector<std::exception_ptr> errors(all.size());
  const auto run = [&](int rank) {
    try {
      LocalCommunicator communicator(group, rank);
      body(communicator);
    } catch (...) {
      errors[static_cast<size_t>(rank)] = std::current_exception();
      world->abort(rank, text_of(errors[static_cast<size_t>(rank)]));
    }
    world->end_rank(rank);
  };
  std::vector<std::thread> threads;
  threads.reserve(all.size());
  std::exception_ptr no_thread;
  try {
    for (const int rank : all) threads.emplace_back(run, rank);
  } catch (const std::system_error& e) {
    no_thread = std::make_exception_ptr(Error(ErrorCode::kMemory, fmt::format("rank {}", threads.size()),
                                              fmt::format("cannot start its thread: {}", e.what()),
                                              "Use fewer ranks, or raise the limit of threads (ulimit -u)."));
    world->abort(static_cast<int>(threads.size()), text_of(no_thread));
  }
  for (std::thread& thread : threads) thread.join();
  if (no_thread) std::rethrow_exception(no_thread);
  rethrow_first(errors, world->aborted_by());
}

}  // namespace concerto
