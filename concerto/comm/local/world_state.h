// What the thread ranks of one world share beside their groups: is it aborted, by whom, why; who has ended; and how many
// threads touch others' memory just now, so that a rank that leaves with an error knows when its memory is its own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "concerto/comm/action_log.h"
#include "concerto/comm/local/local_world.h"
#include "concerto/comm/operation.h"
#include "concerto/comm/random_delays.h"

namespace concerto {

class LocalGroup;

class WorldState {
 public:
  WorldState(int ranks, const LocalOptions& options);

  const LocalOptions& options() const { return options_; }

  // The first call counts. Wakes everybody; returns when nobody touches others' memory any more, nor will again.
  void abort(int rank, const std::string& why);
  bool aborted() const { return aborted_.load(); }
  int aborted_by() const;  // -1: nobody
  // The Error of a rank that was taken along, once its memory is its own. Only when aborted.
  [[noreturn]] void throw_aborted(const std::string& where);
  [[noreturn]] void fail(int rank, const std::string& where, const std::string& what, const std::string& fix);

  void end_rank(int rank);  // its body has returned
  bool ended(int rank) const { return ended_[static_cast<size_t>(rank)].load(); }

  // Around each piece of work on others' memory; false: aborted, keep off.
  bool begin_work();
  void end_work();

  // By the rank's own thread: what it asked for last, in any group, and whether it waits for it, so that an error can
  // tell the rank that hangs from those that wait for it.
  void note(int rank, ActionPhase phase, const std::string& group, const Operation& operation, int world_peer);
  std::string last(int rank) const;  // "waits in tp all_reduce, number 7"

  void add_group(LocalGroup* group);
  void remove_group(LocalGroup* group);

  void delay(int rank);  // of LocalOptions, in that rank's thread

 private:
  struct Last {
    mutable std::mutex mutex;
    std::string group;  // keeps its memory
    OperationKind kind = OperationKind::kBarrier;
    int world_peer = -1;
    int64_t number = 0;
    CommAction action{};
    bool waits = false;
  };
  void wake_all();  // with mutex_ held

  const LocalOptions options_;
  std::atomic<bool> aborted_{false};
  std::atomic<int> working_{0};
  std::vector<std::atomic<bool>> ended_;
  std::vector<RandomDelays> delays_;  // by rank
  mutable std::mutex mutex_;          // taken before that of a group
  std::condition_variable drained_;
  std::vector<LocalGroup*> groups_;
  std::vector<Last> last_;  // by rank
  int aborted_by_ = -1;
  std::string reason_;
};

}  // namespace concerto
