// `concerto launch` as a user sees it: ranks as threads and as processes, what happens when one fails, and signals.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>

#include "concerto/base/clock.h"
#include "concerto/base/files.h"
#include "concerto/checkpoint/checkpoint.h"
#include "concerto/comm/mpi/mpi_world.h"
#include "tests/support/tiny_training.h"

namespace concerto::test {
namespace {
namespace fs = std::filesystem;

double unix_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

class Launch : public ::testing::Test {
 protected:
  Launch() {
    work_.write_data("train", 60, 1);
    work_.write_data("valid", 9, 2);
  }
  ~Launch() override {
    if (running_ > 0) ::kill(running_, SIGKILL);
  }

  std::string config(const std::string& dir, int64_t steps = 6) const {
    RunConfig c = tiny_run_config(work_, dir);
    c.training.steps = steps;
    c.checkpoint.every_steps = 2;
    c.monitor.tensorboard = false;
    c.monitor.log_every_steps = 1;
    return work_.write(dir + ".yaml", run_config_yaml(c));
  }

  // The program of tests/e2e/rank_that_fails.cc, without what mpirun or Slurm may have left in the environment.
  void start(const std::vector<std::string>& arguments, const std::map<std::string, std::string>& variables = {}) {
    output_ = work_ / "output";
    fs::remove(output_);  // nobody waits for what an earlier one has said
    std::vector<char*> argv;
    std::vector<std::string> words = arguments;
    for (std::string& w : words) argv.push_back(w.data());
    argv.push_back(nullptr);
    running_ = ::fork();
    ASSERT_GE(running_, 0);
    if (running_ > 0) return;
    const int out = ::open(output_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    ::dup2(out, STDOUT_FILENO);
    ::dup2(out, STDERR_FILENO);
    ::setenv("OMP_NUM_THREADS", "1", 1);
    ::setenv("ASAN_OPTIONS", "detect_leaks=0", 0);  // Open MPI itself leaves memory behind
    ::setenv("TMPDIR", work_.path().c_str(), 1);    // what a killed supervisor leaves
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
    ::execv(argv[0], argv.data());
    ::_exit(126);
  }
  // 128 + its number for a signal, as shells do.
  int wait() {
    int status = 0;
    ::waitpid(running_, &status, 0);
    running_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  int run(const std::vector<std::string>& arguments, const std::map<std::string, std::string>& variables = {}) {
    start(arguments, variables);
    return wait();
  }
  std::string output() const { return read_text(output_); }
  std::vector<std::string> launch(const std::string& config, int ranks,
                                  const std::vector<std::string>& more = {}) const {
    std::vector<std::string> all = {CONCERTO_TEST_PROGRAM, "launch", "-n", std::to_string(ranks), config};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  void wait_for(const std::string& text) const {
    for (double end = steady_seconds() + 60; output().find(text) == std::string::npos && steady_seconds() < end;)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ASSERT_NE(output().find(text), std::string::npos) << output();
  }
  // Processes of this test's run are known by its folder on their command line.
  int processes_left() const {
    int count = 0;
    for (const auto& entry : fs::directory_iterator("/proc")) {
      const std::string name = entry.path().filename();
      if (name.find_first_not_of("0123456789") != std::string::npos) continue;
      if (read_text(entry.path() / "cmdline").find(work_.path()) != std::string::npos) ++count;
    }
    return count;
  }
  bool gone_within(double seconds) const {
    for (const double end = steady_seconds() + seconds; steady_seconds() < end;) {
      if (processes_left() == 0) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    return false;
  }

  Workplace work_;
  std::string output_;
  pid_t running_ = 0;
};

class LaunchProcesses : public Launch {
 protected:
  void SetUp() override {
    if (!mpi_is_built()) GTEST_SKIP() << "this build has no MPI";
  }
  // Rank 1 fails in `scope`; within 5 s everybody has ended, with this story and its exit code. What is there of the run
  // goes on from a whole checkpoint.
  void fails_in(const std::string& scope, int nth, const std::vector<std::string>& layout, const std::string& action,
                const std::string& place, int ranks = 2, const std::string& how = "kill", int code = 137) {
    const std::string c = config("run"), time = work_ / "time";
    EXPECT_EQ(run(launch(c, ranks, layout),
                  {{"TEST_FAULT", fmt::format("1 {} {} {}", how, nth, scope)}, {"TEST_FAULT_TIME", time}}),
              code)
        << output();
    const double ended = unix_seconds();
    ASSERT_TRUE(fs::exists(time)) << output();
    EXPECT_LT(ended - std::stod(read_text(time)), 5) << output();
    EXPECT_TRUE(gone_within(1));
    EXPECT_HAS(output(), place);
    EXPECT_HAS(output(), action);
    for (const CheckpointInfo& info : list_checkpoints(work_ / "run")) EXPECT_EQ(info.fault, "");
    EXPECT_EQ(run(launch(c, ranks, layout)), 0) << output();
    std::vector<std::string> rows = metrics_rows(work_ / "run");
    EXPECT_EQ(run(launch(config("whole"), ranks, layout)), 0) << output();
    EXPECT_EQ(rows, metrics_rows(work_ / "whole"));
  }
};

const std::vector<std::string> kExperts = {"--parallel.ep=2"}, kPipeline = {"--parallel.pp=2"};

TEST_F(Launch, ThreadsTrain) {
  EXPECT_EQ(run(launch(config("run"), 4, {"--threads", "--parallel.tp=2", "--parallel.ep=4"})), 0) << output();
  EXPECT_HAS(output(), "ranks     4: tp 2, dp 2; experts ep 4");
  EXPECT_HAS(output(), "threads   1 a rank");
  EXPECT_EQ(metrics_values(work_ / "run", "loss").size(), 6u);
}

TEST_F(Launch, RefusesWhatCannotWorkBeforeThereAreRanks) {
  EXPECT_EQ(run(launch(config("run"), 3, {"--threads", "--parallel.tp=2"})), 3);
  EXPECT_HAS(output(), "parallel");
  EXPECT_FALSE(fs::exists(work_ / "run"));
  EXPECT_EQ(run({CONCERTO_TEST_PROGRAM, "launch", config("run")}, {}), 2);
  EXPECT_HAS(output(), "-n RANKS is required");
  EXPECT_EQ(run(launch(config("run"), 2, {"--threads", "--hostfile", config("run")})), 2);
  EXPECT_HAS(output(), "threads are all of this process");
}

TEST_F(Launch, TellsWhichThreadFailed) {
  EXPECT_EQ(
      run(launch(config("run"), 2, {"--threads", "--parallel.pp=2"}), {{"TEST_FAULT", "0 throw 3 send activations"}}),
      1);
  EXPECT_HAS(output(), "rank 0 (pp 0) failed. Its last action: step ");
  EXPECT_HAS(output(), "send activations");
  EXPECT_HAS(output(), "the same command starts anew");
}

TEST_F(Launch, ASlurmRankAloneIsRefused) {
  EXPECT_NE(
      run({CONCERTO_TEST_PROGRAM, "train", config("run")}, {{"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_PROCID", "2"}}), 0);
  EXPECT_HAS(output(), mpi_is_built() ? "Slurm has started 4 ranks, but this one finds itself alone" : "has no MPI");
  EXPECT_FALSE(fs::exists(work_ / "run"));
}

TEST_F(LaunchProcesses, HaveTheNumbersOfThreads) {
  for (const std::vector<std::string>& layout : {std::vector<std::string>{"--parallel.tp=2"}, kExperts, kPipeline}) {
    EXPECT_EQ(run(launch(config("processes"), 2, layout)), 0) << output();
    EXPECT_HAS(output(), "ranks     2: ");
    std::vector<std::string> threads = layout;
    threads.push_back("--threads");
    EXPECT_EQ(run(launch(config("threads"), 2, threads)), 0) << output();
    EXPECT_EQ(metrics_rows(work_ / "processes"), metrics_rows(work_ / "threads")) << layout[0];
    EXPECT_EQ(checkpoint_contents(checkpoint_path(work_ / "processes", 6)),
              checkpoint_contents(checkpoint_path(work_ / "threads", 6)));
    fs::remove_all(work_ / "processes");
    fs::remove_all(work_ / "threads");
  }
}

TEST_F(LaunchProcesses, GoOnWithAnotherNumberOfRanks) {
  EXPECT_EQ(run(launch(config("whole"), 2, kExperts)), 0) << output();
  // Killed on its way, somewhere behind its first checkpoint.
  EXPECT_EQ(run(launch(config("run"), 2, kExperts), {{"TEST_FAULT", "1 kill 2 save of a checkpoint"}}), 137)
      << output();
  ASSERT_FALSE(list_checkpoints(work_ / "run").empty());
  EXPECT_EQ(run(launch(config("run"), 4, {"--parallel.tp=2", "--parallel.pp=2"})), 0) << output();
  EXPECT_HAS(output(), "going on from");
  const std::vector<double> whole = metrics_values(work_ / "whole", "loss"),
                            parts = metrics_values(work_ / "run", "loss");
  ASSERT_EQ(whole.size(), 6u);
  ASSERT_EQ(parts.size(), 6u);
  for (size_t i = 0; i < 6; ++i) EXPECT_NEAR(parts[i], whole[i], 1e-4 * whole[i]) << i;
}

TEST_F(LaunchProcesses, OneIsKilledInDispatch) {
  fails_in("dispatch", 20, kExperts, "dispatch of layer", "rank 1 (dp 1, ep 1): was killed by signal 9 (SIGKILL)");
}
TEST_F(LaunchProcesses, OneIsKilledInCombine) {
  fails_in("combine", 20, kExperts, "combine of layer", "rank 1 (dp 1, ep 1): was killed by signal 9 (SIGKILL)");
}
TEST_F(LaunchProcesses, OneIsKilledInAPipelineSend) {
  fails_in("send gradients", 5, kPipeline, "send gradients, micro-batch",
           "rank 1 (pp 1): was killed by signal 9 (SIGKILL)");
}
TEST_F(LaunchProcesses, OneIsKilledInASave) {
  fails_in("save of a checkpoint", 2, {"--parallel.tp=2"}, "step 4: save of a checkpoint",
           "rank 1 (tp 1): was killed by signal 9 (SIGKILL)");
  EXPECT_HAS(output(), "step");
}
TEST_F(LaunchProcesses, OneCrashes) {
  fails_in("dispatch", 9, kExperts, "dispatch of layer", "rank 1 (dp 1, ep 1): was killed by signal 11 (SIGSEGV)", 2,
           "segv", 139);
}
TEST_F(LaunchProcesses, OneThrows) {
  fails_in("combine", 9, kExperts, "combine of layer", "rank 1 (dp 1, ep 1): ended with exit code 1", 2, "throw", 1);
}

TEST_F(LaunchProcesses, AHangingRankIsNamed) {
  const double begin = steady_seconds();
  EXPECT_EQ(run(launch(config("run"), 2, {"--parallel.ep=2", "--parallel.timeout_minutes=0.05"}),
                {{"TEST_FAULT", "1 hang 9 combine"}}),
            10)
      << output();
  EXPECT_LT(steady_seconds() - begin, 30);
  EXPECT_HAS(output(), "rank 1 has not come");
  EXPECT_HAS(output(), "combine");
  EXPECT_TRUE(gone_within(2));
}

TEST_F(LaunchProcesses, RanksWithOtherSettingsAreNamed) {
  const std::string a = config("run"), b = config("other", 7);
  EXPECT_NE(
      run({"/bin/sh", "-c",
           fmt::format(
               "mpirun -q --allow-run-as-root --oversubscribe -n 2 {0} train {1} : -n 1 {0} train {2} --run.dir={3}",
               CONCERTO_TEST_PROGRAM, a, b, work_ / "run")}),
      0);
  EXPECT_HAS(output(), "rank 2: training.steps is 7, not 6");
  EXPECT_FALSE(fs::exists(work_ / "run/checkpoint-2"));
}

TEST_F(LaunchProcesses, SignalsToTheSupervisorSaveOnce) {
  for (const int signal : {SIGTERM, SIGINT}) {
    const std::string c = config("run", 100000);
    start(launch(c, 2, {"--parallel.tp=2", "--checkpoint.every_steps=0"}));
    wait_for("step 3");
    ::kill(running_, signal);
    if (signal == SIGTERM) ::kill(running_, signal);  // batch systems repeat it
    EXPECT_EQ(wait(), 0) << output();
    EXPECT_TRUE(gone_within(1));
    const std::vector<CheckpointInfo> saved = list_checkpoints(work_ / "run");
    ASSERT_EQ(saved.size(), 1u) << output();
    EXPECT_EQ(saved[0].fault, "");
    EXPECT_EQ(saved[0].step, static_cast<int64_t>(metrics_values(work_ / "run", "loss").size()));
    fs::remove_all(work_ / "run");
  }
}

TEST_F(LaunchProcesses, SignalsToTwoRanksSaveOnce) {
  start(launch(config("run", 100000), 2, {"--parallel.tp=2", "--checkpoint.every_steps=0"}));
  wait_for("step 3");
  int found = 0;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    std::string line = read_text(entry.path() / "cmdline");
    if (line.find(work_.path()) == std::string::npos || line.find("mpirun") != std::string::npos ||
        line.find(std::string("train") + '\0') == std::string::npos)
      continue;
    ::kill(std::stoi(entry.path().filename()), SIGTERM);
    ++found;
  }
  EXPECT_EQ(found, 4);  // two ranks and their guards
  EXPECT_EQ(wait(), 0) << output();
  EXPECT_EQ(list_checkpoints(work_ / "run").size(), 1u);
}

TEST_F(LaunchProcesses, NobodyOutlivesAKilledSupervisor) {
  start(launch(config("run", 100000), 2, {"--parallel.tp=2"}));
  wait_for("step 3");
  ::kill(running_, SIGKILL);
  EXPECT_EQ(wait(), 137);
  EXPECT_TRUE(gone_within(5));
}

}  // namespace
}  // namespace concerto::test
