#include "concerto/data/prefetcher.h"

#include "concerto/base/error.h"

namespace concerto {

Prefetcher::Prefetcher(Fill fill, int64_t first_step, int64_t end_step, int depth, std::function<void()> at_start)
    : fill_(std::move(fill)), first_step_(first_step), end_step_(end_step), slots_(static_cast<size_t>(depth) + 1) {
  CHECK(depth >= 0 && first_step <= end_step);
  if (depth > 0 && first_step < end_step) {
    thread_ = std::thread([this, start = std::move(at_start)] {
      if (start) start();
      work();
    });
  }
}

Prefetcher::~Prefetcher() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Prefetcher::work() {
  const int64_t steps = end_step_ - first_step_, first = first_step_;
  for (int64_t i = 0; i < steps; ++i) {
    {
      std::unique_lock lock(mutex_);
      // The slot of the step that the consumer holds (taken_ - 1) is not free yet.
      changed_.wait(lock,
                    [&] { return stop_ || i - (taken_ > 0 ? taken_ - 1 : 0) < static_cast<int64_t>(slots_.size()); });
      if (stop_) return;
    }
    Slot& slot = slots_[static_cast<size_t>(i) % slots_.size()];
    try {
      fill_(first + i, slot.micro_batches);
    } catch (...) {
      slot.error = std::current_exception();
    }
    {
      std::lock_guard lock(mutex_);
      produced_ = i + 1;
    }
    changed_.notify_all();
    if (slot.error) return;
  }
}

const std::vector<MicroBatch>& Prefetcher::next() {
  CHECK(taken_ < end_step_ - first_step_, "all {} steps were taken", taken_);
  Slot& slot = slots_[static_cast<size_t>(taken_) % slots_.size()];
  if (!thread_.joinable()) {
    fill_(first_step_ + taken_, slot.micro_batches);
    ++taken_;
    return slot.micro_batches;
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return produced_ > taken_; });
  if (slot.error) std::rethrow_exception(slot.error);
  ++taken_;
  lock.unlock();
  changed_.notify_all();
  return slot.micro_batches;
}

}  // namespace concerto
