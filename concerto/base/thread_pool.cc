#include "concerto/base/thread_pool.h"

#include <sched.h>

#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "concerto/base/error.h"

namespace concerto {
namespace {

thread_local bool inside_pool = false;

int default_threads() {
  if (const char* text = std::getenv("OMP_NUM_THREADS")) {
    char* end = nullptr;
    const long n = std::strtol(text, &end, 10);  // "2,1" for nested levels is legal; the first counts
    if (end != text && n >= 1 && n <= 1024) return static_cast<int>(n);
  }
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
  return 1;
}

// Spinning before sleep: a step makes thousands of short calls and a futex wake costs more than most of them.
constexpr int kSpins = 20000;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

struct ThreadPool::State {
  std::atomic<uint64_t> generation{0};
  std::atomic<int> pending{0};
  std::atomic<bool> stop{false};
  void (*fn)(void*, int) = nullptr;
  void* argument = nullptr;
  std::mutex mutex, error_mutex;
  std::condition_variable wake;
  std::exception_ptr error;
  std::vector<std::thread> threads;

  void end() {
    {
      std::lock_guard lock(mutex);
      stop = true;
    }
    wake.notify_all();
    for (auto& thread : threads) thread.join();
    threads.clear();
  }

  void call(int thread) {
    try {
      fn(argument, thread);
    } catch (...) {
      std::lock_guard lock(error_mutex);
      if (!error) error = std::current_exception();
    }
  }

  void work(int thread) {
    inside_pool = true;
    uint64_t seen = 0;
    for (;;) {
      int spins = 0;
      while (generation.load(std::memory_order_acquire) == seen && !stop.load(std::memory_order_relaxed)) {
        if (++spins < kSpins) {
          relax();
          continue;
        }
        std::unique_lock lock(mutex);
        wake.wait(lock, [&] { return generation.load(std::memory_order_acquire) != seen || stop.load(); });
      }
      if (stop.load()) return;
      seen = generation.load(std::memory_order_acquire);
      call(thread);
      pending.fetch_sub(1, std::memory_order_release);
    }
  }
};

ThreadPool::ThreadPool(int threads)
    : size_(threads > 0 ? threads : default_threads()), state_(std::make_unique<State>()) {
  try {
    for (int i = 1; i < size_; ++i) state_->threads.emplace_back([s = state_.get(), i] { s->work(i); });
  } catch (const std::system_error& e) {
    const size_t started = state_->threads.size();
    state_->end();
    throw Error(ErrorCode::kMemory, "threads", fmt::format("{} wanted, {} started: {}", size_, started + 1, e.what()),
                "Set OMP_NUM_THREADS or run.threads to the number of processors.");
  }
}

ThreadPool::~ThreadPool() { state_->end(); }

void ThreadPool::run_erased(void (*fn)(void*, int), void* argument) {
  if (size_ == 1 || inside_pool) {
    for (int i = 0; i < size_; ++i) fn(argument, i);
    return;
  }
  State& s = *state_;
  s.fn = fn;
  s.argument = argument;
  s.pending.store(size_ - 1, std::memory_order_relaxed);
  {
    std::lock_guard lock(s.mutex);
    s.generation.fetch_add(1, std::memory_order_release);
  }
  s.wake.notify_all();
  inside_pool = true;
  s.call(0);
  inside_pool = false;
  for (int spins = 0; s.pending.load(std::memory_order_acquire) != 0;) {
    if (++spins < kSpins)
      relax();
    else
      std::this_thread::yield();
  }
  if (s.error) std::rethrow_exception(std::exchange(s.error, nullptr));
}

}  // namespace concerto
