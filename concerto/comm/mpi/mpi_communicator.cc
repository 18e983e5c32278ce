#include "concerto/comm/mpi/mpi_communicator.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <thread>

#include "concerto/base/clock.h"
#include "concerto/base/hash.h"

namespace concerto {
namespace {

// Two operations of the same tag are never under way at once: a thousand lie between them. Each kind has tags of its own,
// so that ranks that ask for different ones wait, and hear from the watch who asks for what. MPI grants up to 32767.
constexpr int64_t kTags = 1000;
int tag_of(const Operation& operation) {
  const auto kind = operation.kind == OperationKind::kRecv ? OperationKind::kSend : operation.kind;
  return static_cast<int>(static_cast<int64_t>(kind) * kTags + operation.number % kTags);
}

size_t index(int64_t i) { return static_cast<size_t>(i); }

// Between two looks: soon asleep, and longer and longer. (sched_yield is no way to wait on a processor that others want
// as well: it gives away a whole slice of time, where one that wakes up comes first.)
class BackOff {
 public:
  void pause() {
    constexpr int kBusyLooks = 50, kLongest = 500;
    if (++looks_ > kBusyLooks)
      std::this_thread::sleep_for(std::chrono::microseconds(std::min(10 + (looks_ - kBusyLooks), kLongest)));
  }

 private:
  int looks_ = 0;
};

}  // namespace

MpiCommunicator::MpiCommunicator(std::shared_ptr<MpiWatch> watch, MPI_Comm comm, std::string name, uint64_t id)
    : watch_(std::move(watch)), comm_(comm) {
  MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  MPI_Comm_rank(comm_, &rank_);
  MPI_Comm_size(comm_, &size_);
  std::vector<int> members(index(size_));
  std::iota(members.begin(), members.end(), 0);
  group_.id = id;
  group_.name = std::move(name);
  group_.world_ranks.resize(members.size());
  MPI_Group mine, world;
  MPI_Comm_group(comm_, &mine);
  MPI_Comm_group(watch_->world(), &world);
  MPI_Group_translate_ranks(mine, size_, members.data(), world, group_.world_ranks.data());
  MPI_Group_free(&mine);
  MPI_Group_free(&world);
  sent_.resize(members.size());
  received_.resize(members.size());
  watch_->add(&group_);
}

MpiCommunicator::~MpiCommunicator() {
  watch_->remove(&group_);
  if (watch_->aborted()) return;  // what others have sent may still come
  MPI_Comm comm = comm_;
  MPI_Comm_free(&comm);
}

// ---- start

template <class Call>
void MpiCommunicator::guarded(const Entry& entry, Call&& call) {
  try {
    call();
  } catch (const MpiTransfer::Fault& fault) {
    // All transfers under way go on together: the fault may be that of another group, whose ranks are not ours.
    const bool own = fault.of == nullptr || fault.of == &entry.transfer;
    const std::string from =
        fault.rank < 0 || !own ? "" : fmt::format("rank {}: ", group_.world_ranks[index(fault.rank)]);
    watch_->fail(where(entry.operation), (own ? from : "another operation that is under way: ") + fault.what,
                 "The ranks of a group must ask for the same operations, in the same order, with the same sizes.");
  }
}

template <class Fill>
CommTicket MpiCommunicator::start(Fill&& fill) {
  watch_->delays().sleep();
  size_t i = 0;
  while (i < entries_.size() && entries_[i].open) ++i;
  if (i == entries_.size()) entries_.emplace_back();
  Entry& entry = entries_[i];
  fill(entry.operation);
  entry.operation.number = 0;
  guarded(entry, [&] { watch_->poll(); });
  if (watch_->aborted()) watch_->throw_aborted(where(entry.operation));
  begin(entry);
  return {this, static_cast<int64_t>(i)};
}

void MpiCommunicator::begin(Entry& entry) {
  Operation& operation = entry.operation;
  operation.count(rank_, size_, traffic_);
  if (operation.peer >= 0) {
    auto& messages = operation.kind == OperationKind::kSend ? sent_ : received_;
    operation.number = ++messages[index(operation.peer)];
  } else {
    group_.history.add(operation);
    operation.number = group_.history.count();
  }
  note(ActionPhase::kStart, operation);
  entry.open = true;
  watch_->begin(&entry.transfer);
  guarded(entry, [&] {
    entry.transfer.begin(comm_, rank_, size_, tag_of(operation), watch_->options().most_message_bytes,
                         group_.history.hash(), operation);
  });
}

void MpiCommunicator::note(ActionPhase phase, const Operation& operation) {
  watch_->note(phase, group_.name, operation, operation.peer < 0 ? -1 : group_.world_ranks[index(operation.peer)]);
}

CommTicket MpiCommunicator::start_all_to_all(std::span<const View> to, std::span<const View> from) {
  return start([&](Operation& o) { o.set_all_to_all(size_, to, from); });
}

CommTicket MpiCommunicator::start_all_gather(View mine, std::span<const View> parts) {
  return start([&](Operation& o) { o.set_all_gather(rank_, size_, mine, parts); });
}

CommTicket MpiCommunicator::start_reduce_scatter(std::span<const View> parts, View out, Wire wire) {
  return start([&](Operation& o) { o.set_reduce_scatter(rank_, size_, parts, out, wire); });
}

CommTicket MpiCommunicator::start_all_reduce(View inout) {
  return start([&](Operation& o) { o.set_one(OperationKind::kAllReduce, inout); });
}

CommTicket MpiCommunicator::start_reduce_to_owners(std::span<const OwnedPiece> pieces, Wire wire) {
  return start([&](Operation& o) { o.set_owned(OperationKind::kReduceToOwners, size_, pieces, wire); });
}

CommTicket MpiCommunicator::start_broadcast_from_owners(std::span<const OwnedPiece> pieces) {
  return start([&](Operation& o) { o.set_owned(OperationKind::kBroadcastFromOwners, size_, pieces, Wire::kAsIs); });
}

void MpiCommunicator::check_peer(int peer) const {
  CHECK(peer >= 0 && peer < size_ && peer != rank_, "rank {} of {}: peer {}", rank_, size_, peer);
}

CommTicket MpiCommunicator::start_send(View data, int to) {
  check_peer(to);
  return start([&](Operation& o) { o.set_one(OperationKind::kSend, data, to); });
}

CommTicket MpiCommunicator::start_recv(View data, int from) {
  check_peer(from);
  return start([&](Operation& o) { o.set_one(OperationKind::kRecv, data, from); });
}

void MpiCommunicator::barrier() {
  start([](Operation& o) { o.set_none(OperationKind::kBarrier); }).wait();
}

// ---- wait

std::string MpiCommunicator::where(const Operation& operation) const {
  const int peer = operation.peer < 0 ? -1 : group_.world_ranks[index(operation.peer)];
  const std::string text = describe_operation(group_.name, operation.kind, peer, operation.number);
  const std::string action = operation.action.text();
  return action.empty() ? text : fmt::format("{} ({})", text, action);
}

std::string MpiCommunicator::absent(const Entry& entry) const {
  const bool collective = entry.operation.peer < 0;
  std::vector<int> ranks = entry.transfer.missing();
  if (ranks.empty()) {
    ranks.resize(index(size_));
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  return watch_->tell(group_, ranks, collective ? entry.operation.number : 0);
}

void MpiCommunicator::wait(int64_t ticket) {
  watch_->delays().sleep();
  Entry& entry = entries_[index(ticket)];
  CHECK(entry.open, "ticket {} of rank {} is not under way", ticket, rank_);
  const double begin = steady_seconds(), limit = std::max(watch_->options().deadline_seconds, CommPatience::seconds());
  double ask_at = begin + watch_->options().watch_seconds;
  BackOff back_off;
  for (bool noted = false;;) {
    guarded(entry, [&] { watch_->poll(); });
    if (watch_->aborted()) watch_->throw_aborted(where(entry.operation));
    if (entry.transfer.done()) break;
    if (!noted) note(ActionPhase::kWait, entry.operation);
    noted = true;
    const double now = steady_seconds();
    if (now > begin + limit)
      watch_->fail(where(entry.operation), fmt::format("waited {:g} s in vain: {}", limit, absent(entry)),
                   "Look at the ranks that are named: they hang, compute for longer than the deadline, or took another "
                   "way.");
    if (now > ask_at) {
      watch_->ask(group_);
      ask_at = now + watch_->options().watch_seconds;
    }
    back_off.pause();
  }
  note(ActionPhase::kDone, entry.operation);
  watch_->end(&entry.transfer);
  entry.open = false;
}

void MpiCommunicator::drop(int64_t ticket) noexcept {
  Entry& entry = entries_[index(ticket)];
  if (!entry.transfer.done()) watch_->abort(where(entry.operation) + ": left before its end");
  watch_->end(&entry.transfer);
  entry.open = false;
}

// ---- split

std::unique_ptr<Communicator> MpiCommunicator::split(int color, int key, const std::string& name) {
  start([](Operation& o) { o.set_none(OperationKind::kSplit); }).wait();  // all are here: the calls below cannot hang
  const uint64_t id = hash64(fmt::format("{}.{}.{}", group_.id, ++splits_, color));
  MPI_Comm made = MPI_COMM_NULL;
  const uint64_t name_hash = hash64(name), mine[2] = {name_hash, ~name_hash};
  uint64_t most[2] = {};
  Operation operation;
  operation.set_none(OperationKind::kSplit);
  try {
    check_mpi(MPI_Comm_split(comm_, color < 0 ? MPI_UNDEFINED : color, key, &made), "MPI_Comm_split");
    if (made == MPI_COMM_NULL) return nullptr;
    check_mpi(MPI_Allreduce(mine, most, 2, MPI_UINT64_T, MPI_MAX, made), "MPI_Allreduce");
  } catch (const MpiTransfer::Fault& fault) {
    watch_->fail(where(operation), fault.what, "");
  }
  auto group = std::make_unique<MpiCommunicator>(watch_, made, name, id);
  if (most[0] != ~most[1])
    watch_->fail(
        where(operation),
        fmt::format("the ranks of the group that rank {} calls {} call it by several names", watch_->rank(), name), "");
  return group;
}

}  // namespace concerto
