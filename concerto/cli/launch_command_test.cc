// The command line of ranks, and what they compare first.
#include <gtest/gtest.h>

#include <mutex>

#include "concerto/base/test_errors.h"
#include "concerto/base/test_folder.h"
#include "concerto/cli/rank_agreement.h"
#include "concerto/cli/rank_guard.h"
#include "concerto/cli/supervisor.h"
#include "concerto/cli/train_command.h"
#include "concerto/comm/local/local_world.h"

namespace concerto {
namespace {

std::string line(const JobRequest& request, const Surroundings& around) {
  return fmt::format("{}", fmt::join(job_command(request, around), " "));
}

const Surroundings kHere{.program = "/bin/concerto", .mpirun = "/bin/mpirun", .cores = 8};

TEST(JobCommand, HasTheFlagsThatThisMachineNeeds) {
  const std::string ranks = "/bin/mpirun -q -n 4 --bind-to none -x CONCERTO_JOB_FOLDER ",
                    train = "/bin/concerto train c.yaml";
  EXPECT_EQ(line({.config = "c.yaml", .ranks = 4}, kHere), ranks + "--oversubscribe " + train);
  Surroundings around = kHere;
  around.root = true;
  EXPECT_EQ(line({.config = "c.yaml", .ranks = 4}, around), ranks + "--allow-run-as-root --oversubscribe " + train);
  around = kHere;
  around.cores = 2;
  EXPECT_EQ(line({.config = "c.yaml", .ranks = 4}, around), ranks + "--oversubscribe -x OMP_NUM_THREADS=1 " + train);
  EXPECT_EQ(
      line({.config = "c.yaml", .overrides = {"--run.seed=2"}, .ranks = 4, .hostfile = "hosts", .json = true}, kHere),
      ranks + "--hostfile hosts " + train + " --run.seed=2 --json");
}

TEST(JobCommand, InSlurmTakesItsNodes) {
  Surroundings around = kHere;
  around.slurm = true;
  around.srun = "/bin/srun";
  EXPECT_EQ(line({.config = "c.yaml", .ranks = 16}, around),
            "/bin/mpirun -q -n 16 --bind-to none -x CONCERTO_JOB_FOLDER /bin/concerto train c.yaml");
  around.mpirun.clear();
  EXPECT_EQ(line({.config = "c.yaml", .ranks = 16}, around),
            "/bin/srun -n 16 --mpi=pmix --kill-on-bad-exit=1 /bin/concerto train c.yaml");
  expect_error(ErrorCode::kUsage, {"--hostfile", "Slurm's"},
               [&] { job_command({.config = "c.yaml", .ranks = 16, .hostfile = "hosts"}, around); });
}

TEST(JobCommand, WithoutMpirunSaysWhatToInstall) {
  Surroundings around = kHere;
  around.mpirun.clear();
  expect_error(ErrorCode::kUnsupported, {"there is no mpirun", "libopenmpi-dev"},
               [&] { job_command({.config = "c.yaml", .ranks = 2}, around); });
}

TEST(RankEnds, ComeInTheOrderOfTheirTime) {
  const TestFolder folder;
  folder.write("rank-0.end", "0 300 1 0\n");
  folder.write("rank-2.end", "2 200 0 9\n");
  folder.write("rank-1.end", "1 100 0 0\n");
  folder.write("rank-3.end", "cut");
  const std::vector<RankEnd> ends = read_rank_ends(folder.path());
  ASSERT_EQ(ends.size(), 3u);
  EXPECT_EQ(ends[0].rank, 1);
  EXPECT_FALSE(ends[0].failed());
  EXPECT_EQ(ends[1].rank, 2);
  EXPECT_EQ(ends[1].job_exit_code(), 137);
  EXPECT_EQ(ends[2].job_exit_code(), 1);
  EXPECT_EQ(signal_text(9), "signal 9 (SIGKILL)");
}

using Settings = std::vector<std::pair<std::string, std::string>>;

TEST(RankAgreement, RanksOfOneJobGoOn) {
  run_local_ranks(3, [](Communicator& world) {
    check_same_job(world, "concerto 1", {{"a.b", "1"}});
    agree_on_start(world, nullptr);
    const MachineShare share = machine_share(world);
    EXPECT_EQ(share.ranks, 3);
    EXPECT_EQ(share.index, world.rank());
  });
}

TEST(RankAgreement, NamesRanksWithOtherSettings) {
  const auto start = [](Communicator& world) {
    Settings settings = {{"a.b", "1"}, {"a.c", "[1,2]"}, {"a.d", "4"}};
    if (world.rank() % 2 == 1) settings = {{"a.b", "2"}, {"a.c", "[1,2]"}, {"a.e", "5"}};
    check_same_job(world, "concerto 1", settings);
  };
  expect_error(ErrorCode::kConfig,
               {"rank 0", "ranks 1, 3: a.b is 2, not 1; a.d is nothing, not 4; a.e is 5, not nothing"},
               [&] { run_local_ranks(4, start); });
}

TEST(RankAgreement, NamesRanksOfAnotherProgram) {
  expect_error(ErrorCode::kConfig, {"rank 2: runs concerto 2, not concerto 1"}, [] {
    run_local_ranks(3, [](Communicator& world) {
      check_same_job(world, world.rank() == 2 ? "concerto 2" : "concerto 1", {{"a.b", "1"}});
    });
  });
}

TEST(RankAgreement, OneFaultIsTold) {
  std::mutex mutex;
  int thrown = 0;
  expect_error(ErrorCode::kConfig, {"rank 1", "no such file"}, [&] {
    run_local_ranks(3, [&](Communicator& world) {
      std::exception_ptr fault;
      if (world.rank() > 0) fault = std::make_exception_ptr(Error(ErrorCode::kConfig, "c.yaml", "no such file"));
      try {
        agree_on_start(world, fault);
      } catch (const PeerError&) {
        throw;
      } catch (const Error&) {
        const std::lock_guard lock(mutex);
        ++thrown;
        throw;
      }
    });
  });
  EXPECT_EQ(thrown, 1);
}

TEST(RankAgreement, TheMachinesPartMayDiffer) {
  RunConfig a, b;
  b.run.threads = 7;
  b.run.cores = "0-3";
  EXPECT_EQ(shared_settings(a), shared_settings(b));
  b.run.seed = 3;
  EXPECT_NE(shared_settings(a), shared_settings(b));
  EXPECT_TRUE(program_identity().starts_with("concerto ")) << program_identity();
}

TEST(RankThreads, DealTheMachine) {
  RunConfig c;
  c.run.threads = 3;
  EXPECT_EQ(rank_threads(c, {4, 1}).count, 3);
  c.run.threads = 0;
  EXPECT_EQ(rank_threads(c, {4096, 1}).count, 1);
  c.run.cores = "0";
  EXPECT_EQ(rank_threads(c, {1, 0}).cores, (std::vector<int>{0}));
  expect_error(ErrorCode::kConfig, {"run.cores", "1 cores are too few for 2 ranks"}, [&] { rank_threads(c, {2, 0}); });
}

}  // namespace
}  // namespace concerto
