// Reads steps ahead of the trainer on a thread of its own: at most `depth` steps wait, in order, in buffers that are
// used again and again.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "concerto/data/micro_batch.h"

namespace concerto {

class Prefetcher {
 public:
  using Fill = std::function<void(int64_t step, std::vector<MicroBatch>& out)>;

  // Steps [first_step, end_step). depth 0: no thread, next() fills. `at_start` is called on the thread before its work.
  Prefetcher(Fill fill, int64_t first_step, int64_t end_step, int depth, std::function<void()> at_start = {});
  ~Prefetcher();  // stops at the end of the fill that is running
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  // The next step's micro-batches, valid until the following call. Throws what `fill` threw for this step, and again at
  // each further call.
  const std::vector<MicroBatch>& next();

 private:
  struct Slot {
    std::vector<MicroBatch> micro_batches;
    std::exception_ptr error;
  };
  void work();

  Fill fill_;
  int64_t first_step_, end_step_;
  std::vector<Slot> slots_;  // ring; one more than depth, since the consumer holds one
  int64_t produced_ = 0, taken_ = 0;
  bool stop_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread thread_;
};

}  // namespace concerto
