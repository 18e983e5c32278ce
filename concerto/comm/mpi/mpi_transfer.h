// The messages of one rank's operation: a stream to and one from every other rank, each with a few messages under way.
// Sums are made row by row: when message k has come from all ranks, they and the own part are added in rank order.
#pragma once

#include <mpi.h>

#include <vector>

#include "concerto/base/part.h"
#include "concerto/comm/operation.h"
#include "concerto/tensor/arena.h"

namespace concerto {

class MpiTransfer {
 public:
  // What went wrong with a message; rank: in the group.
  struct Fault {
    int rank = -1;
    std::string what;
    const MpiTransfer* of = nullptr;  // null: no transfer's
  };

  // `history`: the hash of the group's operations so far; barrier and split compare it on their way.
  void begin(MPI_Comm comm, int rank, int size, int tag, int64_t most_message_bytes, uint64_t history,
             const Operation& operation);
  // Takes what has come, posts what may go next. Throws Fault.
  void advance();
  bool done() const { return done_; }
  // Others whose data is missing, or who have not taken theirs; empty if that cannot be known (barrier).
  std::vector<int> missing() const;
  // After an abort, in this order: no receive is under way any more (nor later than `give_up`, steady_seconds()) ...
  void cancel_receives(double give_up);
  // ... do peers still read sends? (A send cannot be cancelled: it ends, or its peer has cancelled the receive.) ...
  bool sends_pending();
  // ... all is over.
  void release();

 private:
  static constexpr int kWindow = 4;
  enum class SlotState : uint8_t { kFree, kFlying, kArrived };
  struct Slot {
    SlotState state = SlotState::kFree;
    int64_t bytes = 0;
  };
  // The pieces [first, last) of an owner (or all), of each the elements [begin, begin + count) (or all), message by
  // message.
  struct Cursor {
    int first = 0, last = 0, owner = -1;
    Part range{};
    bool has_range = false;
    int64_t at = 0;  // in piece `first`
  };
  struct Stream {
    Cursor cursor;
    int64_t posted = 0;
    bool ended = true;
  };

  bool is_barrier() const {
    return operation_->kind == OperationKind::kBarrier || operation_->kind == OperationKind::kSplit;
  }
  bool sums() const;
  Cursor cursor(bool sends, int peer) const;
  bool next(Cursor& cursor, Piece& piece) const;
  void begin_phase();
  void post(bool sends, int peer);
  void take(int request, const MPI_Status& status);
  void test();  // takes what has come
  void advance_barrier();
  void sum_rows();
  bool all_taken() const;
  char* scratch(bool sends, int peer, int slot);
  size_t slot_index(bool sends, int peer, int64_t message) const {
    return static_cast<size_t>(((sends ? 0 : size_) + peer) * kWindow + message % kWindow);
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 0, tag_ = 0;
  const Operation* operation_ = nullptr;
  int64_t message_bytes_ = 0;
  bool done_ = true;
  int phase_ = 0;  // of all_reduce: sums, then copies; of a barrier: rounds
  uint64_t history_ = 0, peer_history_ = 0;
  int flying_ = 0;
  std::vector<Stream> streams_;        // to each rank, from each rank
  std::vector<Slot> slots_;            // kWindow a stream
  std::vector<MPI_Request> requests_;  // as slots_
  std::vector<MPI_Status> statuses_;
  std::vector<int> indices_;
  Cursor sum_cursor_;
  int64_t rows_ = 0;  // summed
  Buffer scratch_;
  int64_t scratch_slot_ = 0;  // bytes
};

void check_mpi(int result, const char* call);  // Fault with MPI's text

}  // namespace concerto
