#include "concerto/comm/operation.h"

#include "concerto/base/part.h"

namespace concerto {

const char* operation_name(OperationKind kind) {
  switch (kind) {
    case OperationKind::kAllToAll:
      return "all_to_all";
    case OperationKind::kAllGather:
      return "all_gather";
    case OperationKind::kReduceScatter:
      return "reduce_scatter";
    case OperationKind::kAllReduce:
      return "all_reduce";
    case OperationKind::kReduceToOwners:
      return "reduce_to_owners";
    case OperationKind::kBroadcastFromOwners:
      return "broadcast_from_owners";
    case OperationKind::kSend:
      return "send";
    case OperationKind::kRecv:
      return "recv";
    case OperationKind::kBarrier:
      return "barrier";
    case OperationKind::kSplit:
      return "split";
  }
  return "?";
}

Piece::Piece(const View& view, int owner)
    : data(static_cast<char*>(view.data)), elements(view ? view.elements() : 0), dtype(view.dtype), owner(owner) {
  CHECK(elements == 0 || view.dense(), "a view with gaps: {}", view.shape.str());
  CHECK(elements == 0 || data, "a view without memory: {}", view.shape.str());
}

Piece Piece::range(int64_t begin, int64_t count) const {
  Piece part = *this;
  if (data) part.data += begin * dtype_bytes(dtype);
  part.elements = count;
  return part;
}

std::string Piece::text() const { return fmt::format("{} x {}", elements, dtype_name(dtype)); }

static bool summable(DType type) {
  return type == DType::kF32 || type == DType::kF64 || type == DType::kBF16 || type == DType::kI32 ||
         type == DType::kI64;
}

void Operation::begin(OperationKind kind_, Wire wire_) {
  kind = kind_;
  wire = wire_;
  peer = -1;
  action = CommScope::current();
  pieces.clear();
}

void Operation::set_all_to_all(int size, std::span<const View> to, std::span<const View> from) {
  CHECK(std::ssize(to) == size && std::ssize(from) == size, "{} to, {} from, {} ranks", to.size(), from.size(), size);
  begin(OperationKind::kAllToAll, Wire::kAsIs);
  for (const View& view : to) pieces.emplace_back(view);
  for (const View& view : from) pieces.emplace_back(view);
}

void Operation::set_all_gather(int rank, int size, const View& mine, std::span<const View> parts) {
  CHECK(std::ssize(parts) == size, "{} parts, {} ranks", parts.size(), size);
  begin(OperationKind::kAllGather, Wire::kAsIs);
  pieces.emplace_back(mine);
  for (const View& view : parts) pieces.emplace_back(view);
  const Piece& place = pieces[static_cast<size_t>(rank) + 1];
  CHECK(pieces[0].bytes() == 0 ? place.bytes() == 0 : pieces[0].like(place), "mine {}, its part {}", pieces[0].text(),
        place.text());
}

void Operation::set_reduce_scatter(int rank, int size, std::span<const View> parts, const View& out, Wire wire_) {
  CHECK(std::ssize(parts) == size, "{} parts, {} ranks", parts.size(), size);
  begin(OperationKind::kReduceScatter, wire_);
  for (const View& view : parts) pieces.emplace_back(view);
  const Piece own = pieces[static_cast<size_t>(rank)], result(out);
  pieces.push_back(result);
  CHECK(own.elements == result.elements, "part {}, out {}", own.text(), result.text());
  CHECK(own.elements == 0 || (summable(own.dtype) && (own.dtype == result.dtype ||
                                                      (own.dtype == DType::kBF16 && result.dtype == DType::kF32))),
        "part {}, out {}", own.text(), result.text());
}

void Operation::set_owned(OperationKind kind_, int size, std::span<const OwnedPiece> owned, Wire wire_) {
  begin(kind_, wire_);
  for (const OwnedPiece& piece : owned) {
    CHECK(piece.owner >= 0 && piece.owner < size, "owner {} of {} ranks", piece.owner, size);
    CHECK(kind == OperationKind::kBroadcastFromOwners || summable(piece.data.dtype), "sum of {}",
          dtype_name(piece.data.dtype));
    pieces.emplace_back(piece.data, piece.owner);
  }
}

void Operation::set_one(OperationKind kind_, const View& view, int peer_) {
  CHECK(kind_ != OperationKind::kAllReduce || summable(view.dtype), "sum of {}", dtype_name(view.dtype));
  begin(kind_, Wire::kAsIs);
  peer = peer_;
  pieces.emplace_back(view);
}

void Operation::set_none(OperationKind kind_) { begin(kind_, Wire::kAsIs); }

void Operation::count(int rank, int size, Communicator::Traffic& traffic) const {
  const auto at = [&](int i) -> const Piece& { return pieces[static_cast<size_t>(i)]; };
  const int others = size - 1;
  ++traffic.operations;
  switch (kind) {
    case OperationKind::kAllToAll:
      for (int r = 0; r < size; ++r)
        if (r != rank) traffic.all_to_all += at(r).bytes();
      break;
    case OperationKind::kAllGather:
      traffic.all_gather += at(0).bytes() * others;
      break;
    case OperationKind::kReduceScatter:
      for (int r = 0; r < size; ++r)
        if (r != rank) traffic.reduce_scatter += wire_bytes(at(r));
      break;
    case OperationKind::kAllReduce: {  // to each rank its part, then the sum of the own part to all
      const int64_t own = part_of(at(0).elements, size, rank).count;
      traffic.all_reduce += (at(0).elements - own + own * others) * dtype_bytes(at(0).dtype);
      break;
    }
    case OperationKind::kReduceToOwners:
      for (const Piece& piece : pieces)
        if (piece.owner != rank) traffic.reduce_to_owners += wire_bytes(piece);
      break;
    case OperationKind::kBroadcastFromOwners:
      for (const Piece& piece : pieces)
        if (piece.owner == rank) traffic.broadcast_from_owners += piece.bytes() * others;
      break;
    case OperationKind::kSend:
      traffic.send += at(0).bytes();
      break;
    case OperationKind::kRecv:
    case OperationKind::kBarrier:
    case OperationKind::kSplit:
      break;
  }
}

}  // namespace concerto
