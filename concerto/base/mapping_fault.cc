#include "concerto/base/mapping_fault.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "concerto/base/error.h"

namespace concerto {
namespace {

// Read by a signal handler: of fixed size, without locks. A slot is taken while `begin` is not 0; kReserved while it is
// being filled.
constexpr uintptr_t kReserved = 1;
struct Mapping {
  std::atomic<uintptr_t> begin{0};
  std::atomic<size_t> bytes{0};
  char path[512];
};
Mapping mappings[512];
static_assert(std::atomic<uintptr_t>::is_always_lock_free && std::atomic<size_t>::is_always_lock_free);

struct sigaction before;

void say(const char* text) { [[maybe_unused]] const ssize_t n = ::write(STDERR_FILENO, text, std::strlen(text)); }

void on_bus_error(int, siginfo_t* info, void*) {
  const auto at = reinterpret_cast<uintptr_t>(info->si_addr);
  for (const Mapping& m : mappings) {
    const uintptr_t begin = m.begin.load(std::memory_order_acquire);
    if (begin <= kReserved || at < begin || at - begin >= m.bytes.load(std::memory_order_relaxed)) continue;
    say("\nerror (io): ");
    say(m.path);
    say(": cannot be read any more: it was cut short while it was in use, or its disk fails. Put the file back, then "
        "run "
        "the same command; a training run goes on from its last checkpoint.\n");
    ::_exit(static_cast<int>(ErrorCode::kIo));
  }
  ::sigaction(SIGBUS, &before, nullptr);  // not ours: the same instruction faults again, into the earlier handler
}

}  // namespace

void explain_mapping_faults() {
  struct sigaction action {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(SIGBUS, &action, &before);
}

void note_mapping(const void* begin, size_t bytes, const std::string& path) {
  for (Mapping& m : mappings) {
    uintptr_t free = 0;
    if (!m.begin.compare_exchange_strong(free, kReserved)) continue;
    const size_t n = std::min(path.size(), sizeof m.path - 1);
    std::memcpy(m.path, path.data(), n);
    m.path[n] = '\0';
    m.bytes.store(bytes, std::memory_order_relaxed);
    m.begin.store(reinterpret_cast<uintptr_t>(begin), std::memory_order_release);
    return;
  }
}

void forget_mapping(const void* begin) {
  for (Mapping& m : mappings) {
    auto own = reinterpret_cast<uintptr_t>(begin);
    if (m.begin.compare_exchange_strong(own, 0)) return;
  }
}

}  // namespace concerto
