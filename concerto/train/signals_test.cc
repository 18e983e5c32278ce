#include "concerto/train/signals.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <string>
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

// Before there is anything to save, a signal ends the process with a word and the shell's code for it.
TEST(StopSignals, WithNothingToSaveTheFirstSignalEndsTheProcess) {
  for (const int signal : {SIGINT, SIGTERM}) {
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    EXPECT_EQ(exit_code_of([&] {
                ::dup2(ends[1], STDERR_FILENO);
                const StopSignals signals(StopMeans::kQuit);
                ::raise(signal);
              }),
              128 + signal);
    ::close(ends[1]);
    std::string text;
    for (char c; ::read(ends[0], &c, 1) == 1;) text += c;
    ::close(ends[0]);
    EXPECT_EQ(text, "Stopped while the run was prepared: no step was made, nothing is changed.\n");
  }
}

TEST(StopSignals, WhatTheSignalMeansMayChange) {
  for (const StopMeans means : {StopMeans::kSave, StopMeans::kCut})
    EXPECT_EQ(exit_code_of([&] {
                const StopSignals signals(StopMeans::kQuit);
                StopSignals::set(means);
                ::raise(SIGINT);
                if (StopSignals::requested() != SIGINT) ::_exit(1);
              }),
              0);
}

TEST(StopSignals, ARequestEndsWithTheRunItWasMadeOf) {
  {
    const StopSignals signals;
    ::raise(SIGTERM);
  }
  EXPECT_EQ(StopSignals::requested(), 0);
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
