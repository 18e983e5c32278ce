// A group of ranks that talk to each other. Two transports: comm/local (ranks are threads of one process) and comm/mpi.
//
// All ranks of a group call the same operations in the same order, with views of matching sizes. Every operation starts
// with a call and ends with wait() on its ticket; between the two the memory of its views belongs to it. Views are
// dense. Sums are made in rank order, rank 0 first, each in the type of the view (bf16: added in f32, rounded once at
// the end), whatever the transport, so that their bits never depend on it.
//
// Nothing is allocated after the first operation of its size. Each wait has a deadline: Error(kComm) that names the
// operation, the group, the peer that is missing, and the action (CommScope) that asked for it. When a rank has called
// abort(), every wait of the others ends with a PeerError that carries its reason. An Error(kComm) that is thrown
// here has called abort(): nothing of this world works any more, and nobody touches the memory of its views again. In
// errors a rank is named by its number in the world.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "concerto/tensor/view.h"

namespace concerto {

// What a rank is doing: "forward", micro-batch, layer.
struct CommAction {
  const char* action = nullptr;  // string literals; null: nothing
  const char* inside = nullptr;  // the action around it
  int64_t micro_batch = -1;
  int layer = -1;
  std::string text() const;  // "dispatch of layer 3, micro-batch 5, in forward"; empty for nothing
};

// Says what this thread is doing, for errors, the watchdog and the file of last actions. Scopes nest: an inner one has
// the micro-batch and the layer of the one around it where it gives none.
class CommScope {
 public:
  explicit CommScope(const char* action, int64_t micro_batch = -1, int layer = -1);
  ~CommScope();
  CommScope(const CommScope&) = delete;
  CommScope& operator=(const CommScope&) = delete;
  static const CommAction& current();
  static std::string text() { return current().text(); }

 private:
  CommAction around_;
};

// Inside its life the waits of this thread have at least this deadline: for what ranks do between two operations that
// takes some of them much longer than others (files). A rank that dies ends them at once all the same.
class CommPatience {
 public:
  explicit CommPatience(double seconds);
  ~CommPatience();
  CommPatience(const CommPatience&) = delete;
  CommPatience& operator=(const CommPatience&) = delete;
  static double seconds();  // 0: none

 private:
  double around_;
};

// The Error(kComm) of a rank that another one took along: "rank 5 ended the job: REASON". The other speaks for all.
struct PeerError : Error {
  PeerError(std::string where, int rank, const std::string& reason);
  int rank;  // who ended the job
};

class Communicator;

// An operation under way. Must be waited for, once; moved from or default made: nothing to wait for. One that is dropped
// before its operation has ended (by an exception) aborts the world, since its memory goes away. Its
// communicator outlives it.
class CommTicket {
 public:
  CommTicket() = default;
  CommTicket(Communicator* of, int64_t number) : of_(of), number_(number) {}
  CommTicket(CommTicket&& other) noexcept : of_(other.of_), number_(other.number_) { other.of_ = nullptr; }
  CommTicket& operator=(CommTicket&& other) noexcept {
    if (this != &other) drop();
    of_ = other.of_;
    number_ = other.number_;
    other.of_ = nullptr;
    return *this;
  }
  ~CommTicket() { drop(); }
  explicit operator bool() const { return of_ != nullptr; }
  void wait();
  // For records that are only bytes: its number, from which CommTicket(of, number) is made again to be waited for. In
  // between nobody drops it: whoever owns the memory calls abort() before an exception takes that away.
  int64_t put_down() {
    of_ = nullptr;
    return number_;
  }

 private:
  void drop() noexcept;
  Communicator* of_ = nullptr;
  int64_t number_ = 0;
};

// A tensor that one rank owns and the others have a copy (or a partial sum) of.
struct OwnedPiece {
  View data;
  int owner = 0;
};

// What f32 is sent as. With kBF16 every rank's part is rounded, the receiver's own too (a sum is the same whoever makes
// it), and added in f32; other types are sent as they are.
enum class Wire : uint8_t { kAsIs, kBF16 };

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::string& name() const = 0;  // "tp", "dp", for errors

  // A group of those that pass the same color, ordered by key; color < 0: none, null. Called by all ranks.
  virtual std::unique_ptr<Communicator> split(int color, int key, const std::string& name) = 0;

  // In all of these a default made View stands for one without elements.

  // to[r] goes to rank r, from[r] is filled by it; sizes match pairwise, may be zero, own part included.
  virtual CommTicket start_all_to_all(std::span<const View> to, std::span<const View> from) = 0;
  // parts[r] is filled with rank r's `mine`; that may lie in its own place of `parts`.
  virtual CommTicket start_all_gather(View mine, std::span<const View> parts) = 0;
  // sum over ranks r of their parts[rank()] -> out; out may be f32 where the parts are bf16, and parts[rank()] itself.
  virtual CommTicket start_reduce_scatter(std::span<const View> parts, View out, Wire wire = Wire::kAsIs) = 0;
  virtual CommTicket start_all_reduce(View inout) = 0;  // sum; small tensors and counts
  // For each piece: the sum of all ranks' data, in the owner's memory; the others' stays as it is.
  virtual CommTicket start_reduce_to_owners(std::span<const OwnedPiece> pieces, Wire wire = Wire::kAsIs) = 0;
  // For each piece: the owner's data, in everybody's memory.
  virtual CommTicket start_broadcast_from_owners(std::span<const OwnedPiece> pieces) = 0;
  // Between two ranks, matched in the order of the calls of (from, to). A send's memory is read until its wait.
  virtual CommTicket start_send(View data, int to) = 0;
  virtual CommTicket start_recv(View data, int from) = 0;
  virtual void barrier() = 0;
  // Ends every operation of every group made from the same world, in all ranks, now.
  virtual void abort(const std::string& why) = 0;
  virtual void wait(int64_t ticket) = 0;  // CommTicket's
  virtual void drop(int64_t ticket) noexcept = 0;

  void all_to_all(std::span<const View> to, std::span<const View> from) { start_all_to_all(to, from).wait(); }
  void all_gather(View mine, std::span<const View> parts) { start_all_gather(mine, parts).wait(); }
  void reduce_scatter(std::span<const View> parts, View out, Wire wire = Wire::kAsIs) {
    start_reduce_scatter(parts, out, wire).wait();
  }
  void all_reduce(View inout) { start_all_reduce(inout).wait(); }
  void reduce_to_owners(std::span<const OwnedPiece> pieces, Wire wire = Wire::kAsIs) {
    start_reduce_to_owners(pieces, wire).wait();
  }
  void broadcast_from_owners(std::span<const OwnedPiece> pieces) { start_broadcast_from_owners(pieces).wait(); }
  void send(View data, int to) { start_send(data, to).wait(); }
  void recv(View data, int from) { start_recv(data, from).wait(); }

  // Bytes this rank has sent to others, by operation, since the group was made: what the formulas of arch are held to.
  struct Traffic {
    int64_t all_to_all = 0, all_gather = 0, reduce_scatter = 0, all_reduce = 0, reduce_to_owners = 0,
            broadcast_from_owners = 0, send = 0;
    int64_t operations = 0;
  };
  const Traffic& traffic() const { return traffic_; }

 protected:
  Traffic traffic_;
};

inline void CommTicket::wait() {
  if (!of_) return;
  Communicator* const of = of_;
  of_ = nullptr;
  of->wait(number_);
}
inline void CommTicket::drop() noexcept {
  if (of_) of_->drop(number_);
  of_ = nullptr;
}

}  // namespace concerto
