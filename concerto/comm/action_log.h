// A rank's last actions, in a file that it maps: what it did is there after its process has died, whatever killed it.
// Written without a system call; the ring holds the last kActions of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "concerto/comm/operation.h"

namespace concerto {

enum class ActionPhase : uint8_t {
  kEnter,  // a CommScope
  kStart,  // an operation has been started
  kWait,   // its wait sleeps
  kDone    // its wait has ended
};

// As in the file: native byte order, texts cut to their room.
struct ActionRecord {
  uint64_t sequence = 0;  // from 1; written last, so that a half-written record is known
  int64_t unix_ns = 0;
  int64_t step = -1, micro_batch = -1, number = 0;
  int32_t layer = -1, peer = -1;  // peer: world rank
  ActionPhase phase = ActionPhase::kEnter;
  OperationKind kind = OperationKind::kBarrier;
  char reserved[6] = {};
  char group[16] = {};
  char action[28] = {}, inside[28] = {};

  std::string text() const;  // "step 12: waits in tp all_reduce, number 7 (dispatch of layer 3, micro-batch 5)"
};
static_assert(sizeof(ActionRecord) == 128);

struct LastActions {
  int rank = 0, pid = 0;
  std::string place;
  std::vector<ActionRecord> records;  // oldest first
  std::string last() const;           // text of the newest; "nothing yet"
};

// Error(kIo) if the file is not there, Error(kComm) if it is none of ours. The rank may be alive or dead.
LastActions read_last_actions(const std::string& path);

class ActionLog {
 public:
  static constexpr int kActions = 64;

  // Makes FOLDER/rank-N.actions anew. `place`: where the rank stands in the mesh, for people ("pp 1, dp 0, tp 1").
  // Error(kIo) if it cannot be had.
  ActionLog(const std::string& folder, int rank, const std::string& place);
  ~ActionLog();
  ActionLog(const ActionLog&) = delete;
  ActionLog& operator=(const ActionLog&) = delete;
  static std::string path(const std::string& folder, int rank);

  void set_step(int64_t step) { step_ = step; }

  // The log of the calling thread takes it; nothing happens where there is none.
  static void note_step(int64_t step);
  static void note_scope(const CommAction& action);
  static void note(ActionPhase phase, const std::string& group, const Operation& operation, int world_peer);

 private:
  friend LastActions read_last_actions(const std::string& path);
  struct File;
  ActionRecord* begin(ActionPhase phase, const CommAction& action);
  void end(ActionRecord* record);

  File* file_ = nullptr;
  int64_t step_ = -1;
};

// This thread's actions go to `log` (may be null: nowhere) until the scope ends.
class ActionLogScope {
 public:
  explicit ActionLogScope(ActionLog* log);
  ~ActionLogScope();
  ActionLogScope(const ActionLogScope&) = delete;
  ActionLogScope& operator=(const ActionLogScope&) = delete;

 private:
  ActionLog* const before_;
};

}  // namespace concerto
