#include "concerto/comm/mpi/mpi_transfer.h"

#include <algorithm>
#include <cstring>

#include "concerto/base/clock.h"
#include "concerto/comm/rank_order_sum.h"

namespace concerto {
namespace {

// Scratch is kWindow messages a rank and direction: 8 MiB each way with few ranks, no more than 12 MiB with a hundred.
constexpr int64_t kSumBytes = 2 << 20, kLeastSumBytes = 32 << 10;

size_t index(int64_t i) { return static_cast<size_t>(i); }

}  // namespace

void check_mpi(int result, const char* call) {
  if (result == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(result, text, &length);
  throw MpiTransfer::Fault{-1, fmt::format("{}: {}", call, std::string(text, index(length)))};
}

bool MpiTransfer::sums() const {
  switch (operation_->kind) {
    case OperationKind::kReduceScatter:
    case OperationKind::kReduceToOwners:
      return true;
    case OperationKind::kAllReduce:
      return phase_ == 0;
    default:
      return false;
  }
}

void MpiTransfer::begin(MPI_Comm comm, int rank, int size, int tag, int64_t most_message_bytes, uint64_t history,
                        const Operation& operation) {
  comm_ = comm;
  rank_ = rank;
  size_ = size;
  tag_ = tag;
  operation_ = &operation;
  history_ = peer_history_ = history;
  phase_ = 0;
  flying_ = 0;
  done_ = false;
  const size_t slots = index(2 * size_ * kWindow);
  streams_.resize(index(2 * size_));
  slots_.resize(slots);
  requests_.resize(slots, MPI_REQUEST_NULL);
  statuses_.resize(slots);
  indices_.resize(slots);
  message_bytes_ = sums() ? std::min(most_message_bytes, std::max(kLeastSumBytes, kSumBytes / std::max(size_ - 1, 1)))
                          : most_message_bytes;
  message_bytes_ = std::max<int64_t>(message_bytes_ / 8 * 8, 8);

  const std::vector<Piece>& pieces = operation.pieces;
  if (is_barrier()) {
    advance_barrier();
    return;
  }
  const Piece* from = nullptr;
  const Piece* to = nullptr;
  if (operation.kind == OperationKind::kAllToAll) from = &pieces[index(rank)], to = &pieces[index(size + rank)];
  if (operation.kind == OperationKind::kAllGather) from = &pieces[0], to = &pieces[index(1 + rank)];
  if (from && from->bytes() > 0 && from->data != to->data) std::memcpy(to->data, from->data, index(from->bytes()));
  begin_phase();
  advance();
}

// ---- which pieces go where

MpiTransfer::Cursor MpiTransfer::cursor(bool sends, int peer) const {
  const int n = size_, all = static_cast<int>(operation_->pieces.size());
  Cursor cursor;
  const auto one = [&](int piece) {
    cursor.first = piece;
    cursor.last = piece + 1;
  };
  switch (operation_->kind) {
    case OperationKind::kAllToAll:
      one(sends ? peer : n + peer);
      break;
    case OperationKind::kAllGather:
      one(sends ? 0 : 1 + peer);
      break;
    case OperationKind::kReduceScatter:
      one(sends ? peer : rank_);
      break;
    case OperationKind::kAllReduce:
      one(0);
      cursor.has_range = true;
      cursor.range = part_of(operation_->pieces[0].elements, n, sends == (phase_ == 0) ? peer : rank_);
      break;
    case OperationKind::kReduceToOwners:
      cursor.last = all;
      cursor.owner = sends ? peer : rank_;
      break;
    case OperationKind::kBroadcastFromOwners:
      cursor.last = all;
      cursor.owner = sends ? rank_ : peer;
      break;
    case OperationKind::kSend:
      if (sends && peer == operation_->peer) one(0);
      break;
    case OperationKind::kRecv:
      if (!sends && peer == operation_->peer) one(0);
      break;
    case OperationKind::kBarrier:
    case OperationKind::kSplit:
      break;
  }
  return cursor;
}

// The next message's part of a piece; false: that was all.
bool MpiTransfer::next(Cursor& cursor, Piece& piece) const {
  for (; cursor.first < cursor.last; ++cursor.first, cursor.at = 0) {
    const Piece& whole = operation_->pieces[index(cursor.first)];
    if (cursor.owner >= 0 && whole.owner != cursor.owner) continue;
    const Part range = cursor.has_range ? cursor.range : Part{0, whole.elements};
    if (cursor.at == range.count) continue;
    const int64_t count = std::min(range.count - cursor.at, message_bytes_ / dtype_bytes(whole.dtype));
    piece = whole.range(range.begin + cursor.at, count);
    cursor.at += count;
    return true;
  }
  return false;
}

// ---- messages

void MpiTransfer::begin_phase() {
  for (int peer = 0; peer < size_; ++peer) {
    for (const bool sends : {true, false}) {
      Stream& stream = streams_[index((sends ? 0 : size_) + peer)];
      stream.cursor = cursor(sends, peer);
      stream.posted = 0;
      stream.ended = peer == rank_;
    }
  }
  rows_ = 0;
  if (!sums()) return;
  sum_cursor_ = cursor(false, rank_);
  int64_t widest = 0;
  for (const Piece& piece : operation_->pieces) widest = std::max(widest, piece.bytes());
  const int64_t slot = align_up(std::min(widest, message_bytes_));
  if (slot > scratch_slot_) {
    scratch_slot_ = slot;
    scratch_ = Buffer(slot * 2 * size_ * kWindow, {"buffers of sums over ranks", "Use fewer ranks."});
  }
}

char* MpiTransfer::scratch(bool sends, int peer, int slot) {
  return scratch_.data() + (((sends ? 0 : size_) + peer) * kWindow + slot) * scratch_slot_;
}

void MpiTransfer::post(bool sends, int peer) {
  Stream& stream = streams_[index((sends ? 0 : size_) + peer)];
  while (!stream.ended) {
    const size_t at = slot_index(sends, peer, stream.posted);
    if (slots_[at].state != SlotState::kFree) return;
    Piece piece;
    if (!next(stream.cursor, piece)) {
      stream.ended = true;
      return;
    }
    char* data = piece.data;
    const bool rounds = operation_->rounds(piece);
    if (sums() && (!sends || rounds)) data = scratch(sends, peer, static_cast<int>(stream.posted % kWindow));
    if (sends && rounds)
      for (int64_t i = 0; i < piece.elements; ++i)
        reinterpret_cast<bf16*>(data)[i] = bf16(reinterpret_cast<const float*>(piece.data)[i]);
    const int bytes = static_cast<int>(operation_->wire_bytes(piece));
    check_mpi(sends ? MPI_Isend(data, bytes, MPI_BYTE, peer, tag_, comm_, &requests_[at])
                    : MPI_Irecv(data, bytes, MPI_BYTE, peer, tag_, comm_, &requests_[at]),
              sends ? "MPI_Isend" : "MPI_Irecv");
    slots_[at] = {SlotState::kFlying, bytes};
    ++flying_;
    ++stream.posted;
  }
}

void MpiTransfer::take(int request, const MPI_Status& status) {
  Slot& slot = slots_[index(request)];
  --flying_;
  const int stream = request / kWindow;
  if (stream < size_) {
    slot.state = SlotState::kFree;
    return;
  }
  int bytes = 0;
  MPI_Get_count(&status, MPI_BYTE, &bytes);
  if (bytes != slot.bytes)
    throw Fault{stream - size_, fmt::format("{} bytes came where {} were expected", bytes, slot.bytes), this};
  slot.state = sums() ? SlotState::kArrived : SlotState::kFree;
}

void MpiTransfer::test() {
  if (flying_ == 0) return;
  int taken = 0;
  const int count = static_cast<int>(requests_.size());
  const int result = MPI_Testsome(count, requests_.data(), &taken, indices_.data(), statuses_.data());
  if (result == MPI_ERR_IN_STATUS) {
    for (int i = 0; i < taken; ++i) {
      const int request = indices_[index(i)], error = statuses_[index(i)].MPI_ERROR;
      if (error == MPI_ERR_TRUNCATE)
        throw Fault{request / kWindow - size_,
                    fmt::format("more came than the {} bytes that were expected", slots_[index(request)].bytes), this};
      check_mpi(error, "MPI_Testsome");
    }
  }
  check_mpi(result, "MPI_Testsome");
  for (int i = 0; taken != MPI_UNDEFINED && i < taken; ++i) take(indices_[index(i)], statuses_[index(i)]);
}

void MpiTransfer::advance() {
  if (done_) return;
  test();
  if (is_barrier()) {
    advance_barrier();
    return;
  }
  if (sums()) sum_rows();
  for (int i = 1; i < size_; ++i) {  // each rank begins with another peer
    post(false, (rank_ + size_ - i) % size_);
    post(true, (rank_ + i) % size_);
  }
  if (sums()) sum_rows();  // of a group of one nothing comes
  if (!all_taken()) return;
  if (operation_->kind == OperationKind::kAllReduce && phase_ == 0) {
    phase_ = 1;
    begin_phase();
    advance();
    return;
  }
  done_ = true;
}

// By dissemination: in round k a word to the rank 2^k after, one from the rank 2^k before. The word is the hash of all
// operations so far, so that ranks that took different ways are found here at the latest.
void MpiTransfer::advance_barrier() {
  if (flying_ > 0) return;
  if (peer_history_ != history_)
    throw Fault{(rank_ + size_ - (1 << (phase_ - 1))) % size_,
                "its operations before this one were not the same as here, or not of the same sizes, types and owners",
                this};
  const int step = 1 << phase_++;
  if (step >= size_) {
    done_ = true;
    return;
  }
  const int to = (rank_ + step) % size_, from = (rank_ + size_ - step) % size_;
  const size_t out = slot_index(true, to, 0), in = slot_index(false, from, 0);
  constexpr int kBytes = sizeof(uint64_t);
  slots_[out] = slots_[in] = {SlotState::kFlying, kBytes};
  flying_ = 2;
  check_mpi(MPI_Irecv(&peer_history_, kBytes, MPI_BYTE, from, tag_, comm_, &requests_[in]), "MPI_Irecv");
  check_mpi(MPI_Isend(&history_, kBytes, MPI_BYTE, to, tag_, comm_, &requests_[out]), "MPI_Isend");
}

bool MpiTransfer::all_taken() const {
  if (flying_ > 0) return false;
  for (const Stream& stream : streams_)
    if (!stream.ended) return false;
  Cursor rest = sum_cursor_;
  Piece piece;
  return !sums() || !next(rest, piece);
}

void MpiTransfer::sum_rows() {
  for (;;) {
    for (int r = 0; r < size_; ++r)
      if (r != rank_ && slots_[slot_index(false, r, rows_)].state != SlotState::kArrived) return;
    Piece own;
    if (!next(sum_cursor_, own)) return;
    const bool rounds = size_ > 1 && operation_->rounds(own);
    const auto part = [&](int r) {
      Piece piece = own;
      if (r == rank_) return piece;
      piece.data = scratch(false, r, static_cast<int>(rows_ % kWindow));
      if (rounds) piece.dtype = DType::kBF16;
      return piece;
    };
    Piece out = own;
    if (operation_->kind == OperationKind::kReduceScatter) {
      const Piece &all = operation_->pieces[index(rank_)], &result = operation_->pieces[index(size_)];
      out = result.range((own.data - all.data) / dtype_bytes(own.dtype), own.elements);
    }
    sum_in_rank_order(own.elements, size_, rounds, part, 1, [&](int) { return out; });
    for (int r = 0; r < size_; ++r)
      if (r != rank_) slots_[slot_index(false, r, rows_)].state = SlotState::kFree;
    ++rows_;
  }
}

std::vector<int> MpiTransfer::missing() const {
  std::vector<int> ranks;
  if (done_ || is_barrier()) return ranks;  // who waits for whom says little
  for (const bool sends : {false, true}) {
    for (int r = 0; r < size_; ++r) {
      bool flies = false;
      for (int slot = 0; slot < kWindow; ++slot)
        flies |= slots_[slot_index(sends, r, slot)].state == SlotState::kFlying;
      if (flies) ranks.push_back(r);
    }
    if (!ranks.empty()) return ranks;  // who owes data matters more than who has not taken his
  }
  return ranks;
}

void MpiTransfer::cancel_receives(double give_up) {
  for (size_t i = index(size_ * kWindow); i < requests_.size(); ++i) {
    if (requests_[i] == MPI_REQUEST_NULL) continue;
    MPI_Cancel(&requests_[i]);
    for (int ended = 0; !ended && steady_seconds() < give_up;) MPI_Test(&requests_[i], &ended, MPI_STATUS_IGNORE);
  }
}

bool MpiTransfer::sends_pending() {
  int all_ended = 1;
  MPI_Testall(size_ * kWindow, requests_.data(), &all_ended, MPI_STATUSES_IGNORE);
  return !all_ended;
}

void MpiTransfer::release() {
  for (size_t i = 0; i < requests_.size(); ++i) {
    slots_[i].state = SlotState::kFree;
    if (requests_[i] != MPI_REQUEST_NULL) MPI_Request_free(&requests_[i]);
  }
  flying_ = 0;
  done_ = true;
}

}  // namespace concerto
