#include "concerto/checkpoint/run_lock.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "concerto/base/files.h"
#include "concerto/base/test_folder.h"

namespace concerto {
namespace {

class RunLockTest : public testing::Test {
 protected:
  const TestFolder folder_;
  const std::string dir_ = folder_ / "run";
};

TEST_F(RunLockTest, ASecondHolderIsRefusedByTheNumberOfTheFirst) {
  auto first = std::make_unique<RunLock>(dir_);
  const pid_t parent = getpid(), child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    try {
      RunLock second(dir_);
      _exit(1);
    } catch (const Error& e) {
      const bool named = e.problem == "is in use by process " + std::to_string(parent);
      _exit(e.code == ErrorCode::kCheckpoint && e.where == dir_ && named ? 0 : 2);
    }
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_THROW(RunLock again(dir_), Error);
  first.reset();
  EXPECT_NO_THROW(RunLock free(dir_));
}

TEST_F(RunLockTest, ADeadProcessHoldsNothing) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    new RunLock(dir_);  // never released by its owner
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  EXPECT_NO_THROW(RunLock lock(dir_));
}

TEST_F(RunLockTest, AFolderThatCannotBeMadeIsNamed) {
  write_file_atomic(dir_, "a file");
  try {
    RunLock lock(dir_);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code, ErrorCode::kIo);
    EXPECT_EQ(e.where, dir_);
  }
}

}  // namespace
}  // namespace concerto
