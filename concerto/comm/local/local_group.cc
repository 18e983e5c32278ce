#include "concerto/comm/local/local_group.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <utility>

#include "concerto/base/part.h"
#include "concerto/comm/rank_order_sum.h"

namespace concerto {
namespace {

// Up to so many bytes a rank's operation is done by the last rank that comes: quicker than to wake the others for it.
constexpr int64_t kSmallBytes = 16 << 10;

int units_of(OperationKind kind, int ranks) {
  if (kind == OperationKind::kBarrier) return 0;
  return kind == OperationKind::kSplit ? 1 : ranks;
}

void copy(const Piece& from, const Piece& to) {
  if (from.bytes() > 0 && from.data != to.data) std::memcpy(to.data, from.data, static_cast<size_t>(from.bytes()));
}

int64_t bytes_of(const Operation& operation) {
  int64_t bytes = 0;
  for (const Piece& piece : operation.pieces) bytes += piece.bytes();
  return bytes;
}

// Sizes match, and types where there is anything.
bool match(const Piece& a, const Piece& b) { return a.like(b) || (a.elements == 0 && b.elements == 0); }

}  // namespace

LocalGroup::LocalGroup(std::shared_ptr<WorldState> world, std::string name, std::vector<int> world_ranks)
    : world_(std::move(world)),
      name_(std::move(name)),
      members_(world_ranks.size()),
      channels_(world_ranks.size() * world_ranks.size()) {
  for (size_t i = 0; i < members_.size(); ++i) members_[i].world_rank = world_ranks[i];
  world_->add_group(this);
}

LocalGroup::~LocalGroup() { world_->remove_group(this); }

void LocalGroup::wake_all() {
  const std::lock_guard lock(mutex_);
  wake_members();
}

void LocalGroup::wake_members() {
  for (Member& member : members_) member.wake.notify_all();
}

// ---- entries and slots: made when first needed, used again ever after

LocalGroup::Entry& LocalGroup::take_entry(int rank) {
  Member& member = members_[index(rank)];
  for (Entry& entry : member.entries)
    if (!entry.open) return entry;
  member.entries.emplace_back();
  member.entries.back().ticket = std::ssize(member.entries) - 1;
  return member.entries.back();
}

LocalGroup::Slot& LocalGroup::slot_of(int64_t number) {
  Slot* free = nullptr;
  for (Slot& slot : slots_) {
    if (slot.number == number) return slot;
    if (!free && slot.number == 0) free = &slot;
  }
  CHECK(free);
  free->number = number;
  free->arrived = free->left = free->units_left = 0;
  std::fill(free->entries.begin(), free->entries.end(), nullptr);
  std::fill(free->claimed.begin(), free->claimed.end(), 0);
  return *free;
}

void LocalGroup::release(int rank, Entry& entry) {
  if (Slot* slot = entry.slot; slot && ++slot->left == size()) slot->number = 0;
  entry.open = entry.claimed = entry.done = false;
  entry.slot = nullptr;
  entry.partner = entry.next = nullptr;
  --members_[index(rank)].open;
}

// ---- start

void LocalGroup::note(int rank, ActionPhase phase, const Operation& operation) {
  world_->note(world_rank(rank), phase, name_, operation, operation.peer < 0 ? -1 : world_rank(operation.peer));
}

int64_t LocalGroup::start_filled(std::unique_lock<std::mutex>& lock, int rank, Entry& entry) {
  if (world_->aborted()) {
    entry.operation.number = 0;
    lock.unlock();
    world_->throw_aborted(where(entry));
  }
  Member& member = members_[index(rank)];
  entry.open = true;
  ++member.open;
  // Ranks may be one round of waits apart: each has at most its open operations in use twice over.
  while (std::ssize(slots_) < 2 * member.open + 2) {
    slots_.emplace_back();
    slots_.back().entries.resize(members_.size());
    slots_.back().claimed.resize(members_.size());
  }
  if (entry.operation.peer >= 0)
    start_message(lock, rank, entry);
  else
    start_collective(lock, rank, entry);
  return entry.ticket;
}

void LocalGroup::start_message(std::unique_lock<std::mutex>& lock, int rank, Entry& entry) {
  Operation& operation = entry.operation;
  const bool sends = operation.kind == OperationKind::kSend;
  const int from = sends ? rank : operation.peer, to = sends ? operation.peer : rank;
  Channel& channel = channels_[index(from * size() + to)];
  operation.number = sends ? ++channel.sends : ++channel.recvs;
  note(rank, ActionPhase::kStart, operation);
  Entry* const other = channel.first;
  if (!other || other->operation.kind == operation.kind) {
    (channel.first ? channel.last->next : channel.first) = &entry;
    channel.last = &entry;
    return;
  }
  channel.first = other->next;
  other->next = nullptr;
  other->partner = &entry;
  entry.partner = other;
  if (!match(operation.pieces[0], other->operation.pieces[0]))
    fail(lock, rank, where(entry),
         fmt::format("{} here, but rank {} has {} ({})", operation.pieces[0].text(), world_rank(operation.peer),
                     other->operation.pieces[0].text(), where(*other)),
         "");
  members_[index(operation.peer)].wake.notify_all();
}

void LocalGroup::start_collective(std::unique_lock<std::mutex>& lock, int rank, Entry& entry) {
  Operation& operation = entry.operation;
  operation.number = ++members_[index(rank)].collectives;
  note(rank, ActionPhase::kStart, operation);
  Slot& slot = slot_of(operation.number);
  entry.slot = &slot;
  slot.entries[index(rank)] = &entry;
  if (slot.arrived++ == 0) slot.kind = operation.kind;
  if (slot.kind != operation.kind || slot.begun(size()))
    if (const std::string fault = mismatch(slot); !fault.empty())
      fail(lock, rank, where(entry), fault, "All ranks of a group must ask for the same operations in the same order.");
  if (!slot.begun(size())) return;
  slot.units_left = units_of(slot.kind, size());
  if (slot.units_left > 0 && bytes_of(operation) <= kSmallBytes)
    do_all(lock, slot);
  else
    wake_members();
}

// ---- work

bool LocalGroup::done(const Entry& entry) const {
  if (!entry.slot) return entry.done;
  return entry.slot->begun(size()) && entry.slot->units_left == 0;
}

bool LocalGroup::help(std::unique_lock<std::mutex>& lock, int rank, Entry& entry) {
  if (!entry.slot) return help_message(lock, entry);
  Slot& slot = *entry.slot;
  if (!slot.begun(size())) return false;
  for (int i = 0; i < size(); ++i) {  // the own unit first
    const int unit = (rank + i) % size();
    if (slot.claimed[index(unit)]) continue;
    slot.claimed[index(unit)] = 1;
    lock.unlock();
    const bool work = world_->begin_work();
    if (work) {
      run_unit(slot, unit);
      world_->end_work();
    }
    lock.lock();
    if (work) finish_units(slot, 1);
    return true;
  }
  return false;
}

void LocalGroup::do_all(std::unique_lock<std::mutex>& lock, Slot& slot) {
  const int units = slot.units_left;
  std::fill(slot.claimed.begin(), slot.claimed.end(), 1);
  lock.unlock();
  const bool work = world_->begin_work();
  if (work) {
    for (int unit = 0; unit < units; ++unit) run_unit(slot, unit);
    world_->end_work();
  }
  lock.lock();
  if (work) finish_units(slot, units);
}

void LocalGroup::finish_units(Slot& slot, int units) {
  slot.units_left -= units;
  if (slot.units_left == 0) wake_members();
}

bool LocalGroup::help_message(std::unique_lock<std::mutex>& lock, Entry& entry) {
  Entry* const other = entry.partner;
  if (!other || entry.claimed || other->claimed) return false;
  entry.claimed = true;
  Entry& send = entry.operation.kind == OperationKind::kSend ? entry : *other;
  Entry& recv = &send == &entry ? *other : entry;
  const int peer = entry.operation.peer;
  lock.unlock();
  const bool work = world_->begin_work();
  if (work) {
    copy(send.operation.pieces[0], recv.operation.pieces[0]);
    world_->end_work();
  }
  lock.lock();
  if (work) {
    send.done = recv.done = true;
    members_[index(peer)].wake.notify_all();
  }
  return true;
}

void LocalGroup::run_unit(const Slot& slot, int unit) {
  const int n = size();
  const auto operation = [&](int r) -> const Operation& { return slot.entries[index(r)]->operation; };
  const auto piece = [&](int r, int i) -> const Piece& { return operation(r).pieces[index(i)]; };
  const Operation& own = operation(unit);
  switch (slot.kind) {
    case OperationKind::kAllToAll:
      for (int r = 0; r < n; ++r) copy(piece(r, unit), own.pieces[index(n + r)]);
      break;
    case OperationKind::kAllGather:
      for (int r = 0; r < n; ++r) copy(piece(r, 0), own.pieces[index(1 + r)]);
      break;
    case OperationKind::kReduceScatter:
      sum_in_rank_order(
          own.pieces[index(n)].elements, n, n > 1 && own.rounds(own.pieces[index(unit)]),
          [&](int r) -> const Piece& { return piece(r, unit); }, 1,
          [&](int) -> const Piece& { return own.pieces[index(n)]; });
      break;
    case OperationKind::kAllReduce: {
      const Part part = part_of(own.pieces[0].elements, n, unit);
      const auto range = [&](int r) { return piece(r, 0).range(part.begin, part.count); };
      sum_in_rank_order(part.count, n, false, range, n, range);
      break;
    }
    case OperationKind::kReduceToOwners:
      for (size_t i = 0; i < own.pieces.size(); ++i) {
        if (own.pieces[i].owner != unit) continue;
        const auto part = [&](int r) -> const Piece& { return operation(r).pieces[i]; };
        sum_in_rank_order(own.pieces[i].elements, n, n > 1 && own.rounds(own.pieces[i]), part, 1,
                          [&](int) -> const Piece& { return own.pieces[i]; });
      }
      break;
    case OperationKind::kBroadcastFromOwners:
      for (size_t i = 0; i < own.pieces.size(); ++i) copy(operation(own.pieces[i].owner).pieces[i], own.pieces[i]);
      break;
    case OperationKind::kSplit:
      make_groups(slot);
      break;
    case OperationKind::kBarrier:
    case OperationKind::kSend:
    case OperationKind::kRecv:
      break;
  }
}

// ---- wait

void LocalGroup::wait(int rank, int64_t ticket) {
  Member& member = members_[index(rank)];
  world_->delay(member.world_rank);
  std::unique_lock lock(mutex_);
  Entry& entry = member.entries[static_cast<size_t>(ticket)];
  CHECK(entry.open, "ticket {} of rank {} is not under way", ticket, rank);
  const double limit = std::max(world_->options().deadline_seconds, CommPatience::seconds());
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(limit);
  for (bool late = false;;) {
    if (world_->aborted()) {
      lock.unlock();
      world_->throw_aborted(where(entry));
    }
    if (done(entry)) break;
    if (help(lock, rank, entry)) continue;
    if (const std::string ended = missing(rank, entry, true); !ended.empty()) fail(lock, rank, where(entry), ended, "");
    if (!late) {
      note(rank, ActionPhase::kWait, entry.operation);
      late = member.wake.wait_until(lock, deadline) == std::cv_status::timeout;
      continue;
    }
    if (const std::string absent = missing(rank, entry, false); !absent.empty())
      fail(lock, rank, where(entry), fmt::format("waited {:g} s in vain: {}", limit, absent),
           "Look at the ranks that are named: they hang, compute for longer than the deadline, or took another way.");
    member.wake.wait(lock);  // all are there: another thread is at work on it
  }
  note(rank, ActionPhase::kDone, entry.operation);
  release(rank, entry);
}

void LocalGroup::drop(int rank, int64_t ticket) noexcept {
  std::unique_lock lock(mutex_);
  Entry& entry = members_[index(rank)].entries[static_cast<size_t>(ticket)];
  if (done(entry)) {
    release(rank, entry);
    return;
  }
  const std::string why = fmt::format("{}: left before its end", where(entry));
  lock.unlock();
  world_->abort(world_rank(rank), why);
}

// ---- split

LocalGroup::Split LocalGroup::split(int rank, int color, int key, const std::string& name) {
  std::unique_lock lock(mutex_);
  Entry& entry = take_entry(rank);
  entry.operation.set_none(OperationKind::kSplit);
  entry.split = {color, key, name, nullptr, 0};
  const int64_t ticket = start_filled(lock, rank, entry);
  lock.unlock();
  wait(rank, ticket);
  // After the wait the entry is free, and nobody but this rank takes it.
  return std::exchange(entry.split, {});
}

void LocalGroup::make_groups(const Slot& slot) {
  std::vector<int> order(members_.size());
  std::iota(order.begin(), order.end(), 0);
  const auto split = [&](int r) -> Split& { return slot.entries[index(r)]->split; };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return split(a).color != split(b).color ? split(a).color < split(b).color : split(a).key < split(b).key;
  });
  for (size_t begin = 0, end; begin < order.size(); begin = end) {
    const int color = split(order[begin]).color;
    for (end = begin; end < order.size() && split(order[end]).color == color;) ++end;
    if (color < 0) continue;
    std::vector<int> world_ranks;
    for (size_t i = begin; i < end; ++i) world_ranks.push_back(world_rank(order[i]));
    const auto group = std::make_shared<LocalGroup>(world_, split(order[begin]).name, std::move(world_ranks));
    for (size_t i = begin; i < end; ++i) {
      split(order[i]).group = group;
      split(order[i]).rank = static_cast<int>(i - begin);
    }
  }
}

}  // namespace concerto
