// What a process's groups share: the transfers under way (all go on while any is waited for), the end of the job, and
// the watch channel, a communicator of its own. On it a rank tells that it ends the job; and one that has waited for
// long tells its peers the count and the hash of the group's operations so far. A peer that knows another hash for that
// count throws; else it answers what it does.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <list>
#include <string>
#include <vector>

#include "concerto/comm/action_log.h"
#include "concerto/comm/mpi/mpi_transfer.h"
#include "concerto/comm/mpi/mpi_world.h"
#include "concerto/comm/random_delays.h"

namespace concerto {

// The collective operations of a group so far, as all its ranks must know them.
class OperationHistory {
 public:
  void add(const Operation& operation);
  int64_t count() const { return count_; }
  uint64_t hash() const { return entries_[static_cast<size_t>(count_ % kKept)].hash; }
  // Differs the hash at `count` from `hash`? False if this rank has not come so far, or it is too long ago.
  bool differs(int64_t count, uint64_t hash) const;
  OperationKind kind(int64_t count) const { return entries_[static_cast<size_t>(count % kKept)].kind; }
  CommAction action(int64_t count) const { return entries_[static_cast<size_t>(count % kKept)].action; }

 private:
  static constexpr int64_t kKept = 64;
  struct Entry {
    uint64_t hash = 0;
    OperationKind kind = OperationKind::kBarrier;
    CommAction action{};
  };
  int64_t count_ = 0;
  Entry entries_[kKept];
};

class MpiWatch {
 public:
  // A group as the watch sees it. `id`: the same in all its ranks, another for every group.
  struct Group {
    uint64_t id = 0;
    std::string name;
    std::vector<int> world_ranks;
    OperationHistory history;
  };

  explicit MpiWatch(const MpiOptions& options);
  ~MpiWatch();
  MpiWatch(const MpiWatch&) = delete;
  MpiWatch& operator=(const MpiWatch&) = delete;

  const MpiOptions& options() const { return options_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  MPI_Comm world() const { return world_; }
  RandomDelays& delays() { return delays_; }

  void add(Group* group) { groups_.push_back(group); }
  void remove(Group* group);
  void begin(MpiTransfer* transfer) { transfers_.push_back(transfer); }
  void end(MpiTransfer* transfer);
  // For the answers to others.
  void note(ActionPhase phase, const std::string& group, const Operation& operation, int world_peer);

  // Lets everything under way go on, and reads the watch channel. Throws Error(kComm), PeerError.
  void poll();
  [[noreturn]] void throw_aborted(const std::string& where);  // only when aborted
  void ask(const Group& group);                               // the peers what they do
  // "rank 3 has not come (waits in ...)", of those of `ranks` (in the group) that have not reached `count` operations or,
  // with count 0, all.
  std::string tell(const Group& group, const std::vector<int>& ranks, int64_t count) const;

  void abort(const std::string& why);
  bool aborted() const { return aborted_by_ >= 0; }
  [[noreturn]] void fail(const std::string& where, const std::string& what, const std::string& fix);

 private:
  enum class Kind : int32_t { kAbort, kLeft, kState, kAnswer };
  struct Message {
    Kind kind = Kind::kAbort;
    int32_t from = 0;
    uint64_t group = 0, hash = 0;
    int64_t count = 0;
    char text[984] = {};
  };
  struct Sent {
    Message message;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  struct Answer {
    uint64_t group = 0;
    int64_t count = 0;
    double seconds = 0;  // when it came, steady_seconds()
    std::string text;    // empty: none yet
  };

  std::string state_of(const Answer& answer) const;
  void listen();
  void send(int to, const Message& message);
  void handle(const Message& message);
  void compare(const Message& message, const Group& group);
  void read_channel();
  void cancel_all();

  const MpiOptions options_;
  MPI_Comm world_ = MPI_COMM_NULL, channel_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  RandomDelays delays_;
  std::vector<Group*> groups_;
  std::vector<MpiTransfer*> transfers_;
  Message incoming_;
  MPI_Request listening_ = MPI_REQUEST_NULL;
  std::list<Sent> sent_;
  std::vector<Answer> answers_;  // the last of each world rank
  int aborted_by_ = -1;
  std::string reason_;
  int left_ = 0;            // others whose receives are cancelled
  bool has_left_ = false;   // this rank's are
  std::string last_group_;  // what this rank asked for last
  Operation last_;
  int last_peer_ = -1;
  bool waits_ = false;
};

}  // namespace concerto
