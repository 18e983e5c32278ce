// A group of thread ranks. An operation begins when its last rank has come; from then on anybody who waits for it does
// its work, unit by unit (unit r is what rank r receives), so that it never depends on a rank that computes. Nobody
// spins: a rank without work sleeps until its operation has begun or ended.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "concerto/comm/local/world_state.h"
#include "concerto/comm/operation.h"

namespace concerto {

class LocalGroup {
 public:
  // `world_ranks`: of the members.
  LocalGroup(std::shared_ptr<WorldState> world, std::string name, std::vector<int> world_ranks);
  ~LocalGroup();
  LocalGroup(const LocalGroup&) = delete;
  LocalGroup& operator=(const LocalGroup&) = delete;

  int size() const { return static_cast<int>(members_.size()); }
  const std::string& name() const { return name_; }
  WorldState& world() const { return *world_; }
  int world_rank(int member) const { return members_[index(member)].world_rank; }

  // A split: what a rank gives and gets.
  struct Split {
    int color = -1, key = 0;
    std::string name;
    std::shared_ptr<LocalGroup> group;
    int rank = 0;
  };

  // `fill` writes the arguments into an Operation. Returns the ticket.
  template <class Fill>
  int64_t start(int member, Communicator::Traffic& traffic, Fill&& fill) {
    world_->delay(world_rank(member));
    std::unique_lock lock(mutex_);
    Entry& entry = take_entry(member);
    fill(entry.operation);  // may throw; the entry is then still free
    entry.operation.count(member, size(), traffic);
    return start_filled(lock, member, entry);
  }
  void wait(int member, int64_t ticket);
  void drop(int member, int64_t ticket) noexcept;
  Split split(int member, int color, int key, const std::string& name);
  void wake_all();

 private:
  struct Slot;
  // A rank's part of an operation, from its start to the end of its wait.
  struct Entry {
    Operation operation;
    bool open = false;
    int64_t ticket = 0;
    Slot* slot = nullptr;      // of a collective operation
    Entry* partner = nullptr;  // of a send or recv, once matched
    Entry* next = nullptr;     // in its channel
    bool claimed = false, done = false;
    Split split;
  };
  // A collective operation, from the first rank's start to the last one's wait.
  struct Slot {
    OperationKind kind = OperationKind::kBarrier;
    int64_t number = 0;  // 0: free
    int arrived = 0, left = 0, units_left = 0;
    std::vector<Entry*> entries;  // by rank; null: has not come
    std::vector<char> claimed;    // units
    bool begun(int ranks) const { return arrived == ranks; }
  };
  // The sends and recvs of a pair that have no partner yet: only one of the two kinds at a time.
  struct Channel {
    Entry *first = nullptr, *last = nullptr;
    int64_t sends = 0, recvs = 0;
  };
  struct Member {
    int world_rank = 0;
    std::condition_variable wake;
    std::deque<Entry> entries;  // ticket i is entries[i]
    int open = 0;
    int64_t collectives = 0;
  };

  static size_t index(int i) { return static_cast<size_t>(i); }
  Entry& take_entry(int member);
  int64_t start_filled(std::unique_lock<std::mutex>& lock, int member, Entry& entry);
  void start_message(std::unique_lock<std::mutex>& lock, int member, Entry& entry);
  void start_collective(std::unique_lock<std::mutex>& lock, int member, Entry& entry);
  Slot& slot_of(int64_t number);
  void release(int member, Entry& entry);
  void wake_members();

  bool done(const Entry& entry) const;
  // Does a unit of work of the operation, without the lock; false: there is none to do.
  bool help(std::unique_lock<std::mutex>& lock, int member, Entry& entry);
  bool help_message(std::unique_lock<std::mutex>& lock, Entry& entry);
  void do_all(std::unique_lock<std::mutex>& lock, Slot& slot);
  void run_unit(const Slot& slot, int unit);
  void finish_units(Slot& slot, int units);
  void make_groups(const Slot& slot);

  std::string where(const Entry& entry) const;
  std::string missing(int member, const Entry& entry, bool ended_only) const;
  std::string mismatch(const Slot& slot) const;
  [[noreturn]] void fail(std::unique_lock<std::mutex>& lock, int member, const std::string& where,
                         const std::string& what, const std::string& fix);

  const std::shared_ptr<WorldState> world_;
  const std::string name_;
  std::mutex mutex_;
  std::vector<Member> members_;
  std::deque<Slot> slots_;
  std::vector<Channel> channels_;  // [from, to]
};

}  // namespace concerto
