// What the transports share: the arguments of one rank's operation, flat and checked, and how they are spoken of.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "concerto/comm/communicator.h"

namespace concerto {

enum class OperationKind : uint8_t {
  kAllToAll,
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kReduceToOwners,
  kBroadcastFromOwners,
  kSend,
  kRecv,
  kBarrier,
  kSplit
};
const char* operation_name(OperationKind kind);  // "all_to_all"

// A dense view without its shape.
struct Piece {
  char* data = nullptr;
  int64_t elements = 0;
  DType dtype = DType::kF32;
  int owner = 0;  // of OwnedPiece

  Piece() = default;
  explicit Piece(const View& view, int owner = 0);  // Bug unless dense
  int64_t bytes() const { return elements * dtype_bytes(dtype); }
  Piece range(int64_t begin, int64_t count) const;
  bool like(const Piece& other) const { return elements == other.elements && dtype == other.dtype; }
  std::string text() const;  // "12 x f32"
};

// Each set_ function takes the place of what was there and keeps the memory; Bug for arguments that are wrong on this
// rank alone.
struct Operation {
  OperationKind kind = OperationKind::kBarrier;
  Wire wire = Wire::kAsIs;
  int peer = -1;        // of send and recv
  int64_t number = 0;   // among the collective operations of its group, from 1; send and recv: among those of the pair
  CommAction action{};  // what asked for it
  // all_to_all: n that go, n that come. all_gather: mine, n parts. reduce_scatter: n parts, out. Others: in order.
  std::vector<Piece> pieces;

  void set_all_to_all(int size, std::span<const View> to, std::span<const View> from);
  void set_all_gather(int rank, int size, const View& mine, std::span<const View> parts);
  void set_reduce_scatter(int rank, int size, std::span<const View> parts, const View& out, Wire wire);
  void set_owned(OperationKind kind, int size, std::span<const OwnedPiece> owned, Wire wire);
  void set_one(OperationKind kind, const View& view, int peer = -1);
  void set_none(OperationKind kind);  // barrier, split

  // Is a float of the pieces rounded to bf16 on its way?
  bool rounds(const Piece& piece) const { return wire == Wire::kBF16 && piece.dtype == DType::kF32; }
  int64_t wire_bytes(const Piece& piece) const {
    return piece.elements * (rounds(piece) ? 2 : dtype_bytes(piece.dtype));
  }
  // Adds what rank `rank` of `size` sends to others.
  void count(int rank, int size, Communicator::Traffic& traffic) const;

 private:
  void begin(OperationKind kind, Wire wire);
};

}  // namespace concerto
