// What a process can still get, from made-up folders of /proc and /sys.
#include "concerto/train/memory_report.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "concerto/base/test_folder.h"

namespace concerto {
namespace {
namespace fs = std::filesystem;

constexpr int64_t kMiB = 1 << 20;

class AvailableMemory : public ::testing::Test {
 protected:
  AvailableMemory() { write("proc/meminfo", "MemTotal: 9999 kB\nMemAvailable:    8192 kB\nSwapFree:  1024 kB\n"); }
  void write(const std::string& name, const std::string& text) {
    const fs::path path = fs::path(folder_ / name);
    fs::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  void group2(const std::string& path, const std::string& max, int64_t current, int64_t file = 0) {
    const std::string dir = "sys/fs/cgroup" + path + "/";
    write(dir + "memory.max", max + "\n");
    write(dir + "memory.current", std::to_string(current) + "\n");
    write(dir + "memory.stat", fmt::format("anon 5\ninactive_file {}\nactive_file {}\n", file, file));
  }
  void group1(const std::string& path, int64_t limit, int64_t usage, int64_t file = 0) {
    const std::string dir = "sys/fs/cgroup/memory" + path + "/";
    write(dir + "memory.limit_in_bytes", std::to_string(limit) + "\n");
    write(dir + "memory.usage_in_bytes", std::to_string(usage) + "\n");
    // Without total_ it is the group's own, without those below it.
    write(dir + "memory.stat",
          fmt::format("inactive_file 1\nactive_file 1\ntotal_inactive_file {}\ntotal_active_file {}\n", file, file));
  }
  int64_t available() const { return read_available_memory(folder_.path()); }

  TestFolder folder_;
};

TEST_F(AvailableMemory, WithoutAGroupItIsTheMachines) {
  EXPECT_EQ(available(), 9 * kMiB);
  write("proc/self/cgroup", "1:cpu:/a\n0::/a\n");  // groups without files
  EXPECT_EQ(available(), 9 * kMiB);
  group2("/a", "max", 5 * kMiB);
  EXPECT_EQ(available(), 9 * kMiB);
}

TEST_F(AvailableMemory, NothingKnownIsZero) {
  fs::remove(fs::path(folder_ / "proc/meminfo"));
  EXPECT_EQ(available(), 0);
}

TEST_F(AvailableMemory, Version2TakesTheTightestLimitUpTheHierarchy) {
  write("proc/self/cgroup", "0::/slice/job/step\n");
  group2("/slice/job/step", "max", 1 * kMiB);
  group2("/slice/job", std::to_string(6 * kMiB), 5 * kMiB);
  group2("/slice", std::to_string(100 * kMiB), 5 * kMiB);
  EXPECT_EQ(available(), (6 - 5 + 1) * kMiB);  // and the swap
  group2("/slice/job", std::to_string(6 * kMiB), 5 * kMiB, kMiB);
  EXPECT_EQ(available(), (6 - 5 + 2 + 1) * kMiB);  // pages of files can be dropped
  write("sys/fs/cgroup/slice/job/memory.swap.max", "0\n");
  write("sys/fs/cgroup/slice/job/memory.swap.current", "0\n");
  EXPECT_EQ(available(), (6 - 5 + 2) * kMiB);
  group2("/slice/job", std::to_string(100 * kMiB), 5 * kMiB);
  EXPECT_EQ(available(), 9 * kMiB);  // the machine has less than that
}

TEST_F(AvailableMemory, AFullGroupIsNotAnUnknownOne) {
  write("proc/self/cgroup", "0::/job\n");
  group2("/job", std::to_string(kMiB), 9 * kMiB);
  EXPECT_EQ(available(), 1);
}

TEST_F(AvailableMemory, Version1CountsItsWholeTree) {
  write("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/job/step\n0::/\n");
  group1("", INT64_MAX / 4096 * 4096, 50 * kMiB);
  group1("/job", 6 * kMiB, 5 * kMiB, kMiB);
  group1("/job/step", INT64_MAX / 4096 * 4096, kMiB);
  EXPECT_EQ(available(), (6 - 5 + 2 + 1) * kMiB);
  write("sys/fs/cgroup/memory/job/memory.memsw.limit_in_bytes", std::to_string(6 * kMiB));
  write("sys/fs/cgroup/memory/job/memory.memsw.usage_in_bytes", std::to_string(5 * kMiB));
  EXPECT_EQ(available(), (6 - 5 + 2) * kMiB);
}

// A container sees its own group as the top, whatever the path of the host is.
TEST_F(AvailableMemory, AContainerWhosePathIsTheHosts) {
  write("proc/self/cgroup", "4:memory:/docker/0123abcd\n");
  group1("", 3 * kMiB, 1 * kMiB);
  EXPECT_EQ(available(), 3 * kMiB);
  write("proc/self/cgroup", "0::/../outside\n");
  group2("", std::to_string(4 * kMiB), 1 * kMiB);
  EXPECT_EQ(available(), 4 * kMiB);
}

}  // namespace
}  // namespace concerto
