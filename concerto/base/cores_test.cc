#include "concerto/base/cores.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "concerto/base/test_errors.h"
#include "concerto/base/test_folder.h"
#include "concerto/base/thread_pool.h"

namespace concerto {
namespace {

using Cores = std::vector<int>;

TEST(Cores, ListsAsLinuxWritesThem) {
  Cores cores;
  EXPECT_EQ(parse_cores("0-3,8", cores), "");
  EXPECT_EQ(cores, (Cores{0, 1, 2, 3, 8}));
  EXPECT_EQ(parse_cores("8,0-1,5", cores), "");  // the order is kept: thread 0 on core 8
  EXPECT_EQ(cores, (Cores{8, 0, 1, 5}));
  EXPECT_EQ(format_cores(cores), "8,0-1,5");
  EXPECT_EQ(format_cores({0, 1, 2, 3, 8}), "0-3,8");
  EXPECT_EQ(format_cores({3}), "3");
  EXPECT_EQ(format_cores({}), "");
  EXPECT_EQ(parse_cores("8191", cores), "");
  for (const char* bad : {"", "a", "1,", ",1", "1-", "-1", "1--2", "1 2", "0-8192", "99999999999", "1-2-3", "0x1"})
    EXPECT_NE(parse_cores(bad, cores).find("is no core number below 8192"), std::string::npos) << bad;
  EXPECT_EQ(parse_cores("3-1", cores), "'3-1' ends before it begins");
  EXPECT_EQ(parse_cores("0-2,1", cores), "1 is named twice");
}

// Each thread of the pool says where it may run: no part ends before all have begun, so each is on a thread of its own.
std::vector<Cores> cores_of_threads(ThreadPool& pool) {
  std::vector<Cores> masks(static_cast<size_t>(pool.size()));
  std::atomic<int> begun{0};
  pool.run([&](int part) {
    ++begun;
    while (begun.load() < pool.size()) std::this_thread::yield();
    masks[static_cast<size_t>(part)] = allowed_cores();
  });
  return masks;
}

TEST(PinnedPool, EveryThreadHasItsCore) {
  const Cores before = allowed_cores();
  ASSERT_FALSE(before.empty());
  {
    Cores backwards(before.rbegin(), before.rend());
    ThreadPool pool(0, backwards);
    EXPECT_EQ(pool.size(), static_cast<int>(before.size()));
    const std::vector<Cores> masks = cores_of_threads(pool);
    for (size_t i = 0; i < masks.size(); ++i) EXPECT_EQ(masks[i], Cores{backwards[i]}) << i;
    // A thread that the maker starts leaves the maker's core.
    Cores inherited, left;
    std::thread([&] {
      inherited = allowed_cores();
      pool.leave_core();
      left = allowed_cores();
    }).join();
    EXPECT_EQ(inherited, Cores{backwards[0]});
    EXPECT_EQ(left, before);
  }
  EXPECT_EQ(allowed_cores(), before);  // the maker is free again
}

TEST(PinnedPool, CoresBeyondTheThreadsAreForOthers) {
  const Cores cores = allowed_cores();
  if (cores.size() < 2) GTEST_SKIP() << "one core";
  ThreadPool pool(1, cores);
  EXPECT_EQ(cores_of_threads(pool)[0], Cores{cores[0]});
  Cores left;
  std::thread([&] {
    pool.leave_core();
    left = allowed_cores();
  }).join();
  EXPECT_EQ(left, Cores(cores.begin() + 1, cores.end()));
}

// As ranks that are threads of one process will have it.
TEST(PinnedPool, TwoMakersHaveCoresOfTheirOwn) {
  const Cores cores = allowed_cores();
  if (cores.size() < 2) GTEST_SKIP() << "one core";
  std::vector<Cores> masks(2);
  std::vector<std::thread> ranks;
  for (size_t rank = 0; rank < 2; ++rank)
    ranks.emplace_back([&, rank] {
      ThreadPool pool(0, {cores[rank]});
      masks[rank] = cores_of_threads(pool).at(0);
    });
  for (std::thread& rank : ranks) rank.join();
  for (size_t rank = 0; rank < 2; ++rank) EXPECT_EQ(masks[rank], Cores{cores[rank]});
}

TEST(PinnedPool, WithoutCoresNothingIsPinned) {
  const Cores before = allowed_cores();
  ThreadPool pool(2);
  for (const Cores& mask : cores_of_threads(pool)) EXPECT_EQ(mask, before);
  std::thread([&] {
    pool.leave_core();
    EXPECT_EQ(allowed_cores(), before);
  }).join();
}

TEST(PinnedPool, CoresThatCannotBeHadAreNamed) {
  const long there = ::sysconf(_SC_NPROCESSORS_CONF);
  const Cores before = allowed_cores();
  const int absent = static_cast<int>(there);
  const std::string none = error_of(ErrorCode::kConfig, [&] { ThreadPool pool(1, {before[0], absent}); });
  EXPECT_TRUE(none.find(fmt::format("run.cores: {}: this machine has cores 0-{}", absent, there - 1)) !=
              std::string::npos)
      << none;
  const std::string few = error_of(ErrorCode::kConfig, [&] { ThreadPool pool(3, {before[0]}); });
  EXPECT_TRUE(few.find("fewer cores than the 3 threads") != std::string::npos &&
              few.find("set run.threads to 1 or less") != std::string::npos)
      << few;
  EXPECT_EQ(allowed_cores(), before);
  if (before.size() < 2) return;
  std::thread([&] {  // in a smaller mask, as taskset gives one
    ASSERT_TRUE(set_allowed_cores({before[1]}));
    const std::string text = error_of(ErrorCode::kConfig, [&] { ThreadPool pool(1, {before[0]}); });
    EXPECT_TRUE(text.find(fmt::format("{}: this process may run on {} only", before[0], before[1])) !=
                std::string::npos)
        << text;
    if (!std::getenv("OMP_NUM_THREADS")) {
      EXPECT_EQ(ThreadPool().size(), 1);
    }
  })
      .join();
}

// ---- Quotas of control groups.

class Quota : public ::testing::Test {
 protected:
  void SetUp() override {
    if (allowed_cores().size() < 2) GTEST_SKIP() << "one core: a quota lowers nothing";
  }
  void write(const std::string& name, const std::string& text) {
    const std::filesystem::path path(folder_ / name);
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  int usable() const { return usable_cores(folder_.path()); }
  const int all_ = static_cast<int>(allowed_cores().size());
  TestFolder folder_;
};

TEST_F(Quota, WithoutAGroupItIsTheMask) {
  EXPECT_EQ(usable(), all_);
  write("proc/self/cgroup", "0::/a\n");
  EXPECT_EQ(usable(), all_);
  write("sys/fs/cgroup/a/cpu.max", "max 100000\n");
  EXPECT_EQ(usable(), all_);
  write("sys/fs/cgroup/a/cpu.max", "99900000 100000\n");
  EXPECT_EQ(usable(), std::min(all_, 999));
}

TEST_F(Quota, Version2TakesTheTightestUpTheHierarchyAndRoundsUp) {
  write("proc/self/cgroup", "0::/slice/job\n");
  write("sys/fs/cgroup/slice/job/cpu.max", "max 100000\n");
  write("sys/fs/cgroup/slice/cpu.max", "50000 100000\n");
  EXPECT_EQ(usable(), 1);
  write("sys/fs/cgroup/slice/cpu.max", "150000 100000\n");
  EXPECT_EQ(usable(), 2);
}

TEST_F(Quota, Version1) {
  write("proc/self/cgroup", "3:cpuset:/\n4:cpu,cpuacct:/docker/abc\n");
  write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");  // a container sees its own group at the top
  write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "50000\n");
  EXPECT_EQ(usable(), all_);
  write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "25000\n");
  EXPECT_EQ(usable(), 1);
}

}  // namespace
}  // namespace concerto
