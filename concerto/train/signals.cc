#include "concerto/train/signals.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

#include "concerto/base/error.h"

namespace concerto {
namespace {

// Only lock-free atomics and async-signal-safe calls may be used below.
std::atomic<int> stop_signal{0};
std::atomic<int64_t> interrupt_ns{0};  // when the first SIGINT came
std::atomic<bool> installed{false}, on_terminal{false};
std::atomic<StopMeans> first_means{StopMeans::kSave};
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free &&
              std::atomic<StopMeans>::is_always_lock_free);
struct sigaction old_interrupt, old_terminate, old_user;

constexpr int64_t kSameKeyNs = 50'000'000;
constexpr char kSaving[] = "\nStopping after this step and saving. Ctrl-C again quits at once without saving.\n";
constexpr char kNothing[] = "\nStopped while the run was prepared: no step was made, nothing is changed.\n";

template <size_t N>
void say(const char (&text)[N], size_t from = 0) {
  [[maybe_unused]] const ssize_t n = ::write(STDERR_FILENO, text + from, N - 1 - from);
}

int64_t now_ns() {
  timespec t{};
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

void on_signal(int signal) {
  const int saved_errno = errno;
  if (first_means.load() == StopMeans::kQuit) {
    say(kNothing, on_terminal.load() ? 0 : 1);  // below a live line, or as a line of its own
    ::_exit(128 + signal);
  }
  if (signal == SIGINT) {
    int64_t none = 0;
    const int64_t now = now_ns();
    if (interrupt_ns.compare_exchange_strong(none, now)) {
      if (on_terminal.load() && first_means.load() == StopMeans::kSave) say(kSaving);
    } else if (now - none > kSameKeyNs) {
      ::_exit(128 + SIGINT);
    }
  }
  int nothing = 0;
  stop_signal.compare_exchange_strong(nothing, signal);
  errno = saved_errno;
}

}  // namespace

StopSignals::StopSignals(StopMeans means) {
  CHECK(!installed.exchange(true), "one StopSignals at a time");
  stop_signal.store(0);
  first_means.store(means);
  interrupt_ns.store(0);
  on_terminal.store(::isatty(STDERR_FILENO) == 1);
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;  // reads and writes of the run go on
  ::sigemptyset(&action.sa_mask);
  ::sigaction(SIGINT, &action, &old_interrupt);
  ::sigaction(SIGTERM, &action, &old_terminate);
  ::sigaction(SIGUSR1, &action, &old_user);
}

StopSignals::~StopSignals() {
  ::sigaction(SIGINT, &old_interrupt, nullptr);
  ::sigaction(SIGTERM, &old_terminate, nullptr);
  ::sigaction(SIGUSR1, &old_user, nullptr);
  stop_signal.store(0);  // it asked this run
  installed.store(false);
}

void StopSignals::set(StopMeans means) { first_means.store(means); }

int StopSignals::requested() { return stop_signal.load(std::memory_order_relaxed); }

}  // namespace concerto
