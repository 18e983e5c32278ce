#include "concerto/train/signals.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "concerto/base/error.h"

namespace concerto {
namespace {

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// Runs `body` in a child and gives the child's exit code, or minus the signal that ended it.
template <class F>
int exit_code_of(F&& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    body();
    ::_exit(0);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(StopSignals, FirstSignalIsARequest) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const StopSignals signals;
    EXPECT_EQ(StopSignals::requested(), 0);
    ::raise(signal);
    EXPECT_EQ(StopSignals::requested(), signal);
  }
}

TEST(StopSignals, SecondCtrlCEndsAtOnce) {
  EXPECT_EQ(exit_code_of([] {
              const StopSignals signals;
              ::raise(SIGINT);
              sleep_ms(80);
              ::raise(SIGINT);
            }),
            128 + SIGINT);
}

TEST(StopSignals, OneCtrlCDeliveredTwiceIsStillOne) {
  EXPECT_EQ(exit_code_of([] {
              const StopSignals signals;
              ::raise(SIGINT);
              ::raise(SIGINT);
              if (StopSignals::requested() != SIGINT) ::_exit(1);
            }),
            0);
}

TEST(StopSignals, RepeatedTermIsOnlyARequest) {
  EXPECT_EQ(exit_code_of([] {
              const StopSignals signals;
              for (int i = 0; i < 3; ++i) {
                ::raise(SIGTERM);
                sleep_ms(60);
              }
              ::raise(SIGINT);  // the first Ctrl-C after it does not quit either
              if (StopSignals::requested() != SIGTERM) ::_exit(1);
            }),
            0);
}

TEST(StopSignals, EarlierHandlersComeBack) {
  EXPECT_EQ(exit_code_of([] {
              { const StopSignals signals; }
              ::raise(SIGTERM);
            }),
            -SIGTERM);
}

TEST(StopSignals, TwoAtOnceIsABug) {
  const StopSignals signals;
  EXPECT_THROW(StopSignals(), Bug);
}

}  // namespace
}  // namespace concerto
