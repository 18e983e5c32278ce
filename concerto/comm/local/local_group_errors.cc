// What a LocalGroup says when its ranks disagree or do not come. With its lock held.
#include "concerto/comm/local/local_group.h"

namespace concerto {

std::string LocalGroup::where(const Entry& entry) const {
  const Operation& operation = entry.operation;
  const int peer = operation.peer < 0 ? -1 : world_rank(operation.peer);
  const std::string text = describe_operation(name_, operation.kind, peer, operation.number);
  const std::string action = operation.action.text();
  return action.empty() ? text : fmt::format("{} ({})", text, action);
}

// Who has not come, and what each does instead; only those whose body has returned, if `ended_only`.
std::string LocalGroup::missing(int rank, const Entry& entry, bool ended_only) const {
  std::string text;
  const auto name = [&](int r) {
    const int world_rank = members_[index(r)].world_rank;
    const bool ended = world_->ended(world_rank);
    if (r == rank || (ended_only && !ended)) return;
    text += fmt::format("{}rank {} has {} ({})", text.empty() ? "" : "; ", world_rank, ended ? "ended" : "not come",
                        world_->last(world_rank));
  };
  if (!entry.slot) {
    if (!entry.partner) name(entry.operation.peer);
    return text;
  }
  for (int r = 0; r < size(); ++r)
    if (!entry.slot->entries[index(r)]) name(r);
  return text;
}

void LocalGroup::fail(std::unique_lock<std::mutex>& lock, int rank, const std::string& where, const std::string& what,
                      const std::string& fix) {
  lock.unlock();
  world_->fail(world_rank(rank), where, what, fix);
}

// The first difference between the ranks that have come; empty: none.
std::string LocalGroup::mismatch(const Slot& slot) const {
  const int n = size();
  int first = 0;
  while (!slot.entries[index(first)]) ++first;
  const auto operation = [&](int r) -> const Operation& { return slot.entries[index(r)]->operation; };
  for (int r = 0; r < n; ++r)
    if (slot.entries[index(r)] && operation(r).kind != slot.kind) {
      int other = first;
      while (!slot.entries[index(other)] || operation(other).kind != slot.kind) ++other;
      return fmt::format("rank {} asks for {}, rank {} for {}", world_rank(other), where(*slot.entries[index(other)]),
                         world_rank(r), where(*slot.entries[index(r)]));
    }
  if (!slot.begun(n)) return {};

  // Piece i of rank r must be like piece j of rank s.
  std::string text;
  const auto compare = [&](int r, size_t i, int s, size_t j) {
    const Piece &a = operation(r).pieces[i], &b = operation(s).pieces[j];
    if (text.empty() && !a.like(b) && (a.elements != 0 || b.elements != 0))
      text = fmt::format("rank {} has {} where rank {} has {}", world_rank(r), a.text(), world_rank(s), b.text());
  };
  for (int r = 0; r < n; ++r) {
    const Operation &mine = operation(r), &other = operation(first);
    if (mine.wire != other.wire)
      return fmt::format("ranks {} and {} send in other types", world_rank(first), world_rank(r));
    if (mine.pieces.size() != other.pieces.size())
      return fmt::format("rank {} has {} pieces, rank {} {}", world_rank(first), other.pieces.size(), world_rank(r),
                         mine.pieces.size());
    switch (slot.kind) {
      case OperationKind::kAllToAll:
        for (int s = 0; s < n; ++s) compare(r, index(s), s, index(n + r));
        break;
      case OperationKind::kAllGather:
        for (int s = 0; s < n; ++s) compare(s, 0, r, index(1 + s));
        break;
      case OperationKind::kReduceScatter:
        for (int s = 0; s < n; ++s) compare(first, index(s), r, index(s));
        break;
      case OperationKind::kAllReduce:
      case OperationKind::kReduceToOwners:
      case OperationKind::kBroadcastFromOwners:
        for (size_t i = 0; i < mine.pieces.size(); ++i) {
          compare(first, i, r, i);
          if (mine.pieces[i].owner != other.pieces[i].owner)
            return fmt::format("rank {} takes rank {} for the owner of piece {}, rank {} rank {}", world_rank(first),
                               world_rank(other.pieces[i].owner), i, world_rank(r), world_rank(mine.pieces[i].owner));
        }
        break;
      case OperationKind::kSplit:
        for (int s = 0; s < r; ++s) {
          const Split &a = slot.entries[index(s)]->split, &b = slot.entries[index(r)]->split;
          if (a.color >= 0 && a.color == b.color && a.name != b.name)
            return fmt::format("rank {} calls the group {}, rank {} {}", world_rank(s), a.name, world_rank(r), b.name);
        }
        break;
      case OperationKind::kBarrier:
      case OperationKind::kSend:
      case OperationKind::kRecv:
        break;
    }
    if (!text.empty()) return text;
  }
  return {};
}

}  // namespace concerto
