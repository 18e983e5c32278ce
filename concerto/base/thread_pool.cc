#include "concerto/base/thread_pool.h"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "concerto/base/cores.h"
#include "concerto/base/error.h"

namespace concerto {
namespace {

thread_local bool inside_pool = false;

int pool_size(int threads, const std::vector<int>& cores) {
  if (threads > 0) return threads;
  if (!cores.empty()) return static_cast<int>(cores.size());
  if (const char* text = std::getenv("OMP_NUM_THREADS")) {
    char* end = nullptr;
    const long n = std::strtol(text, &end, 10);  // "2,1" for nested levels is legal; the first counts
    if (end != text && n >= 1 && n <= 1024) return static_cast<int>(n);
  }
  return usable_cores();
}

// Threads of the system for a pool of `size`: more than processors would only get in each other's way. Two at least
// where two are wanted, so that even one processor runs, and the thread sanitizer sees, the same code.
int system_threads(int size) { return std::min(size, std::max(2, static_cast<int>(allowed_cores().size()))); }

// Spinning before sleep: a step makes thousands of short calls and a futex wake costs more than most of them.
constexpr int kSpins = 20000;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

// Each system thread has a fixed block of the parts (one part, where there are enough processors) and begins it in
// order, so that a part mostly finds its data in the cache of the call before. The caller, done with its own block,
// runs whatever parts no worker has begun: it never waits for a thread that the system has not scheduled.
struct ThreadPool::State {
  explicit State(int size) : size(size), claims(static_cast<size_t>(size)) {}

  const int size;
  int threads_wanted = system_threads(size);
  std::atomic<uint64_t> generation{0};        // counts calls
  std::vector<std::atomic<uint64_t>> claims;  // [part]: the last generation in which somebody began it
  std::atomic<int> pending{0};                // parts of workers' blocks that are not done
  std::atomic<bool> stop{false};
  void (*fn)(void*, int) = nullptr;
  void* argument = nullptr;
  std::mutex mutex, error_mutex;
  std::condition_variable wake;
  std::exception_ptr error;
  std::vector<std::thread> threads;
  std::vector<int> cores_before;  // of the maker, where it was pinned
  std::thread::id maker = std::this_thread::get_id();

  void end() {
    {
      std::lock_guard lock(mutex);
      stop = true;
    }
    wake.notify_all();
    for (auto& thread : threads) thread.join();
    threads.clear();
    if (!cores_before.empty() && std::this_thread::get_id() == maker) set_allowed_cores(cores_before);
  }

  // The maker, from which the thread that it starts next inherits its core.
  void pin_maker(int core) {
    if (cores_before.empty()) cores_before = allowed_cores();
    if (set_allowed_cores({core})) return;
    end();
    throw Error(ErrorCode::kConfig, "run.cores", fmt::format("the system refuses to pin a thread to core {}", core),
                "Choose another, or leave run.cores out.");
  }

  int block_begin(int thread) const { return static_cast<int>(int64_t{size} * thread / threads_wanted); }

  // False: another thread has begun it, or this generation is over (a worker that was away for long).
  bool claim(int part, uint64_t now) {
    std::atomic<uint64_t>& last = claims[static_cast<size_t>(part)];
    uint64_t before = last.load(std::memory_order_relaxed);
    return before < now && last.compare_exchange_strong(before, now, std::memory_order_acq_rel);
  }

  void call(int part) {
    try {
      fn(argument, part);
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
      for (int part = block_begin(thread), end = block_begin(thread + 1); part < end; ++part) {
        if (!claim(part, seen)) continue;
        call(part);
        pending.fetch_sub(1, std::memory_order_release);
      }
    }
  }
};

ThreadPool::ThreadPool(int threads, const std::vector<int>& cores)
    : cores_(cores), size_(pool_size(threads, cores)), state_(std::make_unique<State>(size_)) {
  if (!cores_.empty()) check_cores(cores_);
  if (!cores_.empty() && static_cast<size_t>(size_) > cores_.size())
    throw Error(ErrorCode::kConfig, "run.cores",
                fmt::format("{}: fewer cores than the {} threads", format_cores(cores_), size_),
                fmt::format("Name a core for each thread, or set run.threads to {} or less.", cores_.size()));
  const int wanted = state_->threads_wanted;
  try {
    for (int i = 1; i < wanted; ++i) {
      if (!cores_.empty()) state_->pin_maker(cores_[static_cast<size_t>(i)]);
      state_->threads.emplace_back([s = state_.get(), i] { s->work(i); });
    }
    if (!cores_.empty()) state_->pin_maker(cores_[0]);
  } catch (const std::system_error& e) {
    const size_t started = state_->threads.size();
    state_->end();
    throw Error(ErrorCode::kMemory, "threads", fmt::format("{} wanted, {} started: {}", wanted, started + 1, e.what()),
                "Set OMP_NUM_THREADS or run.threads to the number of processors.");
  }
}

ThreadPool::~ThreadPool() { state_->end(); }

void ThreadPool::leave_core() const {
  if (cores_.empty()) return;
  const std::vector<int> rest(cores_.begin() + size_, cores_.end());
  set_allowed_cores(rest.empty() ? cores_ : rest);
}

void ThreadPool::run_erased(void (*fn)(void*, int), void* argument) {
  if (size_ == 1 || inside_pool) {
    for (int i = 0; i < size_; ++i) fn(argument, i);
    return;
  }
  State& s = *state_;
  s.fn = fn;
  s.argument = argument;
  const int own = s.block_begin(1);
  s.pending.store(size_ - own, std::memory_order_relaxed);
  uint64_t now = 0;
  {
    std::lock_guard lock(s.mutex);
    now = s.generation.fetch_add(1, std::memory_order_release) + 1;
  }
  s.wake.notify_all();
  inside_pool = true;
  for (int part = 0; part < own; ++part) s.call(part);
  int taken = 0;
  for (int part = size_ - 1; part >= own; --part) {  // from the end: a worker that is in its block begins them last
    if (!s.claim(part, now)) continue;
    s.call(part);
    ++taken;
  }
  inside_pool = false;
  s.pending.fetch_sub(taken, std::memory_order_relaxed);
  for (int spins = 0; s.pending.load(std::memory_order_acquire) != 0;) {
    if (++spins < kSpins)
      relax();
    else
      std::this_thread::yield();
  }
  if (s.error) std::rethrow_exception(std::exchange(s.error, nullptr));
}

}  // namespace concerto
