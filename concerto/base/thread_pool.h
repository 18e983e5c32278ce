// The one pool of compute threads of a rank. Work is split statically into as many parts as the pool has threads, so
// the same number gives the same parts; which thread of the system runs a part is left to the moment (there are never
// more of them than processors). No allocation per call. Nested calls run inline on the calling thread.
//
// A pool may be given cores: each of its threads, the one that made it among them, is then pinned to one of them until
// the pool ends. Without, the system places them: beside other processes it does so better.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

namespace concerto {

class ThreadPool {
 public:
  // threads <= 0: as many as `cores`, if any; else OMP_NUM_THREADS if set and sane, else the cores that this process may
  // use (usable_cores). Part i runs on cores[i], unless another thread is free sooner; cores beyond the parts are for
  // what works beside (leave_core). Error(kConfig) if there are fewer cores than threads, or a core is not there or not
  // allowed.
  explicit ThreadPool(int threads = 0, const std::vector<int>& cores = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }
  const std::vector<int>& cores() const { return cores_; }  // as given
  // For a thread that the pool's maker started, and that therefore inherited its core: to the cores that are left over,
  // or else to all of the pool's. Does nothing without cores.
  void leave_core() const;

  // fn(thread) once for each thread number in [0, size()), two of them never at once with the same number.
  template <class F>
  void run(F&& fn) {
    using Fn = std::remove_reference_t<F>;
    run_erased([](void* f, int thread) { (*static_cast<Fn*>(f))(thread); },
               const_cast<void*>(static_cast<const void*>(&fn)));
  }

  // fn(begin, end, thread) on contiguous ranges of [0, n) whose borders are multiples of `grain`.
  template <class F>
  void parallel_for(int64_t n, int64_t grain, F&& fn) {
    if (n <= 0) return;
    const int64_t blocks = (n + grain - 1) / grain;
    if (size_ == 1 || blocks == 1) {
      fn(int64_t{0}, n, 0);
      return;
    }
    auto body = [&](int thread) {
      const int64_t begin = blocks * thread / size_ * grain, end = blocks * (thread + 1) / size_ * grain;
      if (begin < n && begin < end) fn(begin, end < n ? end : n, thread);
    };
    run(body);
  }

  // fn(i, thread) for i in [0, n), handed out one by one to whoever is free: for uneven pieces whose results do not
  // depend on the thread.
  template <class F>
  void parallel_dynamic(int64_t n, F&& fn) {
    if (size_ == 1 || n <= 1) {
      for (int64_t i = 0; i < n; ++i) fn(i, 0);
      return;
    }
    std::atomic<int64_t> next{0};
    auto body = [&](int thread) {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) fn(i, thread);
    };
    run(body);
  }

 private:
  struct State;
  void run_erased(void (*fn)(void*, int), void* argument);
  std::vector<int> cores_;
  int size_;
  std::unique_ptr<State> state_;
};

}  // namespace concerto
