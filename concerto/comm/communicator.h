// A group of ranks that talk to each other. Two transports: comm/local (ranks are threads of one process) and comm/mpi.
//
// All ranks of a group call the same operations in the same order, with views of matching sizes. Every operation starts
// with a call and ends with wait() on its ticket; between the two the memory of its views belongs to it. Views are
// dense. Sums are made in rank order, rank 0 first, each in the type of the view (bf16: added in f32, rounded once at
// the end), whatever the transport, so that their bits never depend on it.
//
// Nothing is allocated after the first operation of its size. Each wait has a deadline: Error(kComm) that names the
// operation, the group, the peer that is missing, and the action (CommScope) that asked for it. When a rank has called
// abort(), every wait of the others ends with an Error(kComm) that carries its reason.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "concerto/tensor/view.h"

namespace concerto {

// What this thread is doing, for errors, the watchdog and the file of last actions: "forward", micro-batch, layer.
// Scopes nest; names are string literals.
class CommScope {
 public:
  explicit CommScope(const char* action, int64_t micro_batch = -1, int layer = -1);
  ~CommScope();
  CommScope(const CommScope&) = delete;
  CommScope& operator=(const CommScope&) = delete;
  static std::string text();  // "dispatch of layer 3, micro-batch 5"
};

class Communicator;

// An operation under way. Must be waited for, once; moved from or default made: nothing to wait for.
class CommTicket {
 public:
  CommTicket() = default;
  CommTicket(Communicator* of, int64_t number) : of_(of), number_(number) {}
  CommTicket(CommTicket&& other) noexcept : of_(other.of_), number_(other.number_) { other.of_ = nullptr; }
  CommTicket& operator=(CommTicket&& other) noexcept {
    of_ = other.of_;
    number_ = other.number_;
    other.of_ = nullptr;
    return *this;
  }
  ~CommTicket() = default;
  explicit operator bool() const { return of_ != nullptr; }
  void wait();

 private:
  Communicator* of_ = nullptr;
  int64_t number_ = 0;
};

// A tensor that one rank owns and the others have a copy (or a partial sum) of.
struct OwnedPiece {
  View data;
  int owner = 0;
};

enum class Wire { kAsIs, kBF16 };  // what floats are sent as; sums are made in f32 all the same

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::string& name() const = 0;  // "tp", "dp", for errors

  // A group of those that pass the same color, ordered by key; color < 0: none, null. Called by all ranks.
  virtual std::unique_ptr<Communicator> split(int color, int key, const std::string& name) = 0;

  // to[r] goes to rank r, from[r] is filled by it; sizes match pairwise, may be zero, own part included.
  virtual CommTicket start_all_to_all(std::span<const View> to, std::span<const View> from) = 0;
  // parts[r] is filled with rank r's `mine`.
  virtual CommTicket start_all_gather(View mine, std::span<const View> parts) = 0;
  // sum over ranks r of their parts[rank()] -> out; out may be a wider float type (bf16 parts, f32 out).
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

}  // namespace concerto
