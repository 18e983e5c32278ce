#include "concerto/base/mapping_fault.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <vector>

#include "concerto/base/files.h"
#include "concerto/base/test_folder.h"

namespace concerto {
namespace {

class MappingFault : public ::testing::Test {
 protected:
  struct End {
    int code;  // or minus the signal
    std::string error;
  };
  template <class F>
  End in_a_child(F&& body) {
    int ends[2];
    EXPECT_EQ(::pipe(ends), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      ::dup2(ends[1], STDERR_FILENO);
      ::signal(SIGBUS, SIG_DFL);  // of sanitizers
      explain_mapping_faults();
      body();
      ::_exit(0);
    }
    ::close(ends[1]);
    End end{};
    for (char c; ::read(ends[0], &c, 1) == 1;) end.error += c;
    ::close(ends[0]);
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    end.code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    return end;
  }

  static constexpr int64_t kBytes = 1 << 16;
  const TestFolder folder_;
  const std::string path_ = folder_.write("tokens.bin", std::string(kBytes, 'x'));
};

int64_t sum(const MappedFile& file) {
  int64_t total = 0;
  for (const std::byte b : file.bytes()) total += static_cast<int64_t>(b);
  return total;
}

TEST_F(MappingFault, ACutFileIsNamed) {
  const End end = in_a_child([&] {
    MappedFile first(path_);
    const MappedFile moved = std::move(first);  // it is the memory that counts, not the object
    if (sum(moved) != kBytes * 'x') ::_exit(1);
    std::filesystem::resize_file(path_, 100);
    if (sum(moved) == 0) ::_exit(2);
  });
  EXPECT_EQ(end.code, static_cast<int>(ErrorCode::kIo)) << end.error;
  EXPECT_TRUE(end.error.starts_with("\nerror (io): " + path_ + ": cannot be read any more: ")) << end.error;
}

// Of a file that is no longer open, or was never one of ours, nothing may be said.
TEST_F(MappingFault, AnotherBusErrorStaysWhatItWas) {
  const End end = in_a_child([&] {
    { const MappedFile closed(path_); }
    const int fd = ::fileno(std::fopen(path_.c_str(), "r"));
    const char* p = static_cast<const char*>(::mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, fd, 0));
    std::filesystem::resize_file(path_, 100);
    ::_exit(p[kBytes - 1] == 0 ? 1 : 2);
  });
  EXPECT_EQ(end.code, -SIGBUS);
  EXPECT_EQ(end.error, "");
}

TEST_F(MappingFault, MoreFilesThanItKnowsAreFine) {
  std::vector<MappedFile> files;
  for (int i = 0; i < 600; ++i) files.emplace_back(path_);
  for (const MappedFile& file : files) ASSERT_EQ(file.bytes().size(), static_cast<size_t>(kBytes));
}

}  // namespace
}  // namespace concerto
