#include "concerto/comm/mpi/mpi_watch.h"

#include <sys/prctl.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "concerto/base/clock.h"
#include "concerto/base/hash.h"

namespace concerto {
namespace {

constexpr int kWatchTag = 1;

size_t index(int64_t i) { return static_cast<size_t>(i); }

std::string with_action(const std::string& text, const CommAction& action) {
  const std::string about = action.text();
  return about.empty() ? text : fmt::format("{} ({})", text, about);
}

}  // namespace

// What all ranks pass alike: the kind, the wire, and the sizes, where these are the same everywhere.
void OperationHistory::add(const Operation& operation) {
  uint64_t hash = this->hash();
  const auto mix = [&](uint64_t value) {
    hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  };
  mix(static_cast<uint64_t>(operation.kind) * 2 + static_cast<uint64_t>(operation.wire) + 1);
  const auto mix_piece = [&](const Piece& piece) {
    mix(static_cast<uint64_t>(piece.elements) * 8 + (piece.elements ? static_cast<uint64_t>(piece.dtype) : 0));
    mix(static_cast<uint64_t>(piece.owner));
  };
  const size_t all = operation.pieces.size();
  switch (operation.kind) {
    case OperationKind::kAllGather:  // the parts
      for (size_t i = 1; i < all; ++i) mix_piece(operation.pieces[i]);
      break;
    case OperationKind::kReduceScatter:
      for (size_t i = 0; i + 1 < all; ++i) mix_piece(operation.pieces[i]);
      break;
    case OperationKind::kAllReduce:
    case OperationKind::kReduceToOwners:
    case OperationKind::kBroadcastFromOwners:
      for (const Piece& piece : operation.pieces) mix_piece(piece);
      break;
    default:
      break;
  }
  entries_[index(++count_ % kKept)] = {hash, operation.kind, operation.action};
}

bool OperationHistory::differs(int64_t count, uint64_t hash) const {
  if (count > count_ || count <= count_ - kKept) return false;
  return entries_[index(count % kKept)].hash != hash;
}

MpiWatch::MpiWatch(const MpiOptions& options) : options_(options), delays_(0, 0, 0) {
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &world_), "MPI_Comm_dup");
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &channel_), "MPI_Comm_dup");
  MPI_Comm_set_errhandler(channel_, MPI_ERRORS_RETURN);
  MPI_Comm_rank(world_, &rank_);
  MPI_Comm_size(world_, &size_);
  ::prctl(PR_SET_TIMERSLACK, 1000UL);  // ns: the short sleeps between two looks are to be short
  delays_ = RandomDelays(options.delay_seed, rank_, options.most_delay_seconds);
  answers_.resize(index(size_));
  listen();
}

MpiWatch::~MpiWatch() {
  if (listening_ != MPI_REQUEST_NULL) {
    MPI_Cancel(&listening_);
    MPI_Wait(&listening_, MPI_STATUS_IGNORE);
  }
  if (aborted()) return;  // messages of ranks that left early may still come: the communicators stay
  for (Sent& sent : sent_)
    if (sent.request != MPI_REQUEST_NULL) MPI_Request_free(&sent.request);
  MPI_Comm_free(&channel_);
  MPI_Comm_free(&world_);
}

void MpiWatch::remove(Group* group) { std::erase(groups_, group); }
void MpiWatch::end(MpiTransfer* transfer) { std::erase(transfers_, transfer); }

void MpiWatch::note(ActionPhase phase, const std::string& group, const Operation& operation, int world_peer) {
  ActionLog::note(phase, group, operation, world_peer);
  last_group_ = group;
  last_.kind = operation.kind;
  last_.number = operation.number;
  last_.action = operation.action;
  last_peer_ = world_peer;
  waits_ = phase == ActionPhase::kWait;
}

// ---- the channel

void MpiWatch::listen() {
  check_mpi(MPI_Irecv(&incoming_, sizeof(Message), MPI_BYTE, MPI_ANY_SOURCE, kWatchTag, channel_, &listening_),
            "MPI_Irecv");
}

void MpiWatch::send(int to, const Message& message) {
  Sent* free = nullptr;
  for (Sent& sent : sent_) {
    int ended = 1;
    if (sent.request != MPI_REQUEST_NULL) MPI_Test(&sent.request, &ended, MPI_STATUS_IGNORE);
    if (ended) free = &sent;
  }
  if (!free) free = &sent_.emplace_back();
  free->message = message;
  MPI_Isend(&free->message, sizeof(Message), MPI_BYTE, to, kWatchTag, channel_, &free->request);
}

void MpiWatch::poll() {
  read_channel();
  for (MpiTransfer* transfer : transfers_)
    if (!transfer->done()) transfer->advance();
}

void MpiWatch::read_channel() {
  int came = 0;
  while (check_mpi(MPI_Test(&listening_, &came, MPI_STATUS_IGNORE), "MPI_Test"), came) {
    const Message message = incoming_;
    listen();
    handle(message);
  }
}

void MpiWatch::handle(const Message& message) {
  if (message.kind == Kind::kAbort) {
    if (aborted()) return;
    aborted_by_ = message.from;
    reason_ = message.text;
    return;
  }
  if (message.kind == Kind::kLeft) {
    ++left_;
    return;
  }
  if (aborted()) return;
  if (message.kind == Kind::kAnswer) {
    answers_[index(message.from)] = {message.group, message.count, steady_seconds(), message.text};
    return;
  }
  Message answer;
  answer.kind = Kind::kAnswer;
  answer.from = rank_;
  answer.group = message.group;
  for (const Group* group : groups_) {
    if (group->id != message.group) continue;
    compare(message, *group);
    answer.count = group->history.count();
  }
  const std::string text =
      last_.number == 0 ? "has asked for nothing yet"
                        : fmt::format("{} {}", waits_ ? "waits in" : "came last to",
                                      with_action(describe_operation(last_group_, last_.kind, last_peer_, last_.number),
                                                  last_.action));
  std::strncpy(answer.text, text.c_str(), sizeof(answer.text) - 1);
  send(message.from, answer);
}

void MpiWatch::compare(const Message& message, const Group& group) {
  if (!group.history.differs(message.count, message.hash)) return;
  const std::string mine =
      with_action(describe_operation(group.name, group.history.kind(message.count), -1, message.count),
                  group.history.action(message.count));
  const bool same = mine == message.text;
  fail(mine,
       same ? fmt::format("ranks {} and {} ask for it with other sizes, types or owners, or asked for other operations "
                          "before it",
                          message.from, rank_)
            : fmt::format("rank {} asks for {}, rank {} for {}", message.from, message.text, rank_, mine),
       "All ranks of a group must ask for the same operations in the same order.");
}

void MpiWatch::ask(const Group& group) {
  Message message;
  message.kind = Kind::kState;
  message.from = rank_;
  message.group = group.id;
  message.count = group.history.count();
  message.hash = group.history.hash();
  const std::string text =
      with_action(describe_operation(group.name, group.history.kind(message.count), -1, message.count),
                  group.history.action(message.count));
  std::strncpy(message.text, text.c_str(), sizeof(message.text) - 1);
  for (const int rank : group.world_ranks)
    if (rank != rank_) send(rank, message);
}

// A rank that waits answers every question; one whose answer is old does something else by now.
std::string MpiWatch::state_of(const Answer& answer) const {
  const std::string silent = "it does not answer: it computes, hangs or is gone";
  if (answer.text.empty()) return silent;
  const double age = steady_seconds() - answer.seconds;
  if (age <= 3 * options_.watch_seconds) return answer.text;
  return fmt::format("{}; {:.1f} s ago: {}", silent, age, answer.text);
}

std::string MpiWatch::tell(const Group& group, const std::vector<int>& ranks, int64_t count) const {
  std::string text;
  for (const int r : ranks) {
    const int world_rank = group.world_ranks[index(r)];
    if (world_rank == rank_) continue;
    const Answer& answer = answers_[index(world_rank)];
    const bool came = count > 0 && answer.group == group.id && answer.count >= count;
    if (came && std::ssize(ranks) == std::ssize(group.world_ranks)) continue;
    text += fmt::format("{}rank {} {} ({})", text.empty() ? "" : "; ", world_rank,
                        came ? "has come, but its data has not" : "has not come", state_of(answer));
  }
  return text;
}

// ---- the end of the job

void MpiWatch::abort(const std::string& why) {
  if (!aborted()) {
    aborted_by_ = rank_;
    reason_ = why;
    Message message;
    message.kind = Kind::kAbort;
    message.from = rank_;
    std::strncpy(message.text, why.c_str(), sizeof(message.text) - 1);
    for (int r = 0; r < size_; ++r)
      if (r != rank_) send(r, message);
  }
  cancel_all();
}

// The memory of this rank's operations must be its own when this returns. Its receives are cancelled; a send that a peer
// has matched must end, and the others when that peer has cancelled its receives too. Who hangs is not waited for.
void MpiWatch::cancel_all() {
  constexpr double kPatience = 1;
  const double give_up = steady_seconds() + kPatience;
  for (MpiTransfer* transfer : transfers_) transfer->cancel_receives(give_up);
  if (!has_left_) {
    has_left_ = true;
    Message message;
    message.kind = Kind::kLeft;
    message.from = rank_;
    for (int r = 0; r < size_; ++r)
      if (r != rank_) send(r, message);
  }
  const auto on_its_way = [](Sent& sent) {  // what MPI has taken must also leave this process
    int ended = 1;
    if (sent.request != MPI_REQUEST_NULL) MPI_Test(&sent.request, &ended, MPI_STATUS_IGNORE);
    return !ended;
  };
  const auto pending = [](MpiTransfer* transfer) { return transfer->sends_pending(); };
  while (steady_seconds() < give_up &&
         (std::any_of(sent_.begin(), sent_.end(), on_its_way) ||
          (left_ < size_ - 1 && std::any_of(transfers_.begin(), transfers_.end(), pending)))) {
    read_channel();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  for (MpiTransfer* transfer : transfers_) transfer->release();
  transfers_.clear();
}

void MpiWatch::throw_aborted(const std::string& where) {
  cancel_all();
  throw PeerError(where, aborted_by_, reason_);
}

void MpiWatch::fail(const std::string& where, const std::string& what, const std::string& fix) {
  if (aborted()) throw_aborted(where);
  Error error(ErrorCode::kComm, where, what, fix);
  abort(error.what());
  throw error;
}

}  // namespace concerto
