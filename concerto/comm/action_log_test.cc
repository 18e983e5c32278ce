#include "concerto/comm/action_log.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>

#include "concerto/base/test_errors.h"
#include "concerto/base/test_folder.h"

namespace concerto {
namespace {

TEST(ActionLog, IsReadAfterItsProcessWasKilled) {
  const TestFolder folder;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ActionLog log(folder.path(), 3, "pp 1, tp 1");
    const ActionLogScope to(&log);
    log.set_step(12);
    const CommScope forward("forward", 5);
    const CommScope dispatch("dispatch", -1, 3);
    Operation operation;
    operation.set_none(OperationKind::kAllToAll);
    operation.number = 7;
    ActionLog::note(ActionPhase::kStart, "ep", operation, -1);
    ActionLog::note(ActionPhase::kWait, "ep", operation, -1);
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));

  const LastActions actions = read_last_actions(ActionLog::path(folder.path(), 3));
  EXPECT_EQ(actions.rank, 3);
  EXPECT_EQ(actions.pid, child);
  EXPECT_EQ(actions.place, "pp 1, tp 1");
  ASSERT_EQ(actions.records.size(), 4u);
  EXPECT_EQ(actions.records[0].text(), "step 12: forward, micro-batch 5");
  EXPECT_EQ(actions.records[1].text(), "step 12: dispatch of layer 3, micro-batch 5, in forward");
  EXPECT_EQ(actions.records[2].text(),
            "step 12: has started ep all_to_all, number 7 (dispatch of layer 3, micro-batch 5, in forward)");
  EXPECT_EQ(actions.last(),
            "step 12: waits in ep all_to_all, number 7 (dispatch of layer 3, micro-batch 5, in forward)");
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  EXPECT_NEAR(static_cast<double>(actions.records[3].unix_ns) * 1e-9, std::chrono::duration<double>(now).count(), 60);
}

TEST(ActionLog, KeepsTheLastOnesInOrder) {
  const TestFolder folder;
  ActionLog log(folder.path(), 0, "");
  {
    const ActionLogScope to(&log);
    for (int i = 0; i < 150; ++i) const CommScope scope("forward", i);
    const ActionLogScope nowhere(nullptr);
    const CommScope unseen("unseen");
  }
  const CommScope unseen("unseen");
  const LastActions actions = read_last_actions(ActionLog::path(folder.path(), 0));
  ASSERT_EQ(actions.records.size(), static_cast<size_t>(ActionLog::kActions));
  for (size_t i = 0; i < actions.records.size(); ++i)
    EXPECT_EQ(actions.records[i].micro_batch, 150 - ActionLog::kActions + static_cast<int>(i));
}

TEST(ActionLog, CutsLongTexts) {
  const TestFolder folder;
  ActionLog log(folder.path(), 0, std::string(1000, 'p'));
  const ActionLogScope to(&log);
  const CommScope scope("a name that is longer than the room for it");
  const LastActions actions = read_last_actions(ActionLog::path(folder.path(), 0));
  EXPECT_EQ(actions.last(), "a name that is longer than ");
  EXPECT_EQ(actions.place, std::string(103, 'p'));
}

TEST(ActionLog, AnEmptyOne) {
  const TestFolder folder;
  const ActionLog log(folder.path(), 0, "");
  EXPECT_EQ(read_last_actions(ActionLog::path(folder.path(), 0)).last(), "nothing yet");
}

TEST(ActionLog, FilesThatAreNone) {
  const TestFolder folder;
  expect_error(ErrorCode::kIo, {"none/rank-2.actions"}, [&] { ActionLog(folder / "none", 2, ""); });
  expect_error(ErrorCode::kIo, {"rank-1.actions"}, [&] { read_last_actions(ActionLog::path(folder.path(), 1)); });
  const std::string text = folder.write("rank-1.actions", "hello");
  expect_error(ErrorCode::kComm, {text, "not a file of last actions"}, [&] { read_last_actions(text); });
}

}  // namespace
}  // namespace concerto
