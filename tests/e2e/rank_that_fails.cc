// The program, in which one rank fails inside a CommScope: TEST_FAULT="RANK HOW NTH SCOPE", HOW one of kill, segv, throw,
// hang; NTH entry of the scope of that name. Before it does, the seconds since 1970 go into the file TEST_FAULT_TIME.
// The linker (--wrap) leads every CommScope of the program through here.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "concerto/cli/program.h"
#include "concerto/cli/rank_guard.h"

namespace {

struct Fault {
  int rank = -1, nth = 0;
  char how[16] = {}, scope[64] = {};
};

Fault read_fault() {
  Fault f;
  const char* text = std::getenv("TEST_FAULT");
  if (!text || std::sscanf(text, "%d %15s %d %63[^\n]", &f.rank, f.how, &f.nth, f.scope) != 4) return {};
  return f;
}

void fail(const std::string& how) {
  if (const char* path = std::getenv("TEST_FAULT_TIME"))
    if (std::FILE* file = std::fopen(path, "w")) {
      const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
      std::fprintf(file, "%.3f\n", now.count());
      std::fclose(file);
    }
  if (how == "kill") ::kill(::getpid(), SIGKILL);
  if (how == "segv") {
    ::signal(SIGSEGV, SIG_DFL);  // not a sanitizer's
    ::raise(SIGSEGV);
  }
  if (how == "throw") throw std::runtime_error("the test throws");
  for (;;) ::pause();
}

}  // namespace

extern "C" {
// concerto::CommScope::CommScope(const char*, int64_t, int)
void __real__ZN8concerto9CommScopeC1EPKcli(void* self, const char* action, int64_t micro_batch, int layer);
void __wrap__ZN8concerto9CommScopeC1EPKcli(void* self, const char* action, int64_t micro_batch, int layer) {
  __real__ZN8concerto9CommScopeC1EPKcli(self, action, micro_batch, layer);
  static const Fault fault = read_fault();
  static int entered = 0;
  if (fault.rank != concerto::started_rank().rank || std::strcmp(action, fault.scope) != 0) return;
  if (++entered == fault.nth) fail(fault.how);
}
}

int main(int argc, char** argv) { return concerto::run_program(argc, argv); }
