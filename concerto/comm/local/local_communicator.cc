#include "concerto/comm/local/local_communicator.h"

namespace concerto {

std::unique_ptr<Communicator> LocalCommunicator::split(int color, int key, const std::string& name) {
  LocalGroup::Split made = group_->split(rank_, color, key, name);
  if (!made.group) return nullptr;
  return std::make_unique<LocalCommunicator>(std::move(made.group), made.rank);
}

CommTicket LocalCommunicator::start_all_to_all(std::span<const View> to, std::span<const View> from) {
  return start([&](Operation& o) { o.set_all_to_all(size(), to, from); });
}

CommTicket LocalCommunicator::start_all_gather(View mine, std::span<const View> parts) {
  return start([&](Operation& o) { o.set_all_gather(rank_, size(), mine, parts); });
}

CommTicket LocalCommunicator::start_reduce_scatter(std::span<const View> parts, View out, Wire wire) {
  return start([&](Operation& o) { o.set_reduce_scatter(rank_, size(), parts, out, wire); });
}

CommTicket LocalCommunicator::start_all_reduce(View inout) {
  return start([&](Operation& o) { o.set_one(OperationKind::kAllReduce, inout); });
}

CommTicket LocalCommunicator::start_reduce_to_owners(std::span<const OwnedPiece> pieces, Wire wire) {
  return start([&](Operation& o) { o.set_owned(OperationKind::kReduceToOwners, size(), pieces, wire); });
}

CommTicket LocalCommunicator::start_broadcast_from_owners(std::span<const OwnedPiece> pieces) {
  return start([&](Operation& o) { o.set_owned(OperationKind::kBroadcastFromOwners, size(), pieces, Wire::kAsIs); });
}

void LocalCommunicator::check_peer(int peer) const {
  CHECK(peer >= 0 && peer < size() && peer != rank_, "rank {} of {}: peer {}", rank_, size(), peer);
}

CommTicket LocalCommunicator::start_send(View data, int to) {
  check_peer(to);
  return start([&](Operation& o) { o.set_one(OperationKind::kSend, data, to); });
}

CommTicket LocalCommunicator::start_recv(View data, int from) {
  check_peer(from);
  return start([&](Operation& o) { o.set_one(OperationKind::kRecv, data, from); });
}

void LocalCommunicator::barrier() {
  start([](Operation& o) { o.set_none(OperationKind::kBarrier); }).wait();
}

void LocalCommunicator::abort(const std::string& why) { group_->world().abort(group_->world_rank(rank_), why); }

}  // namespace concerto
