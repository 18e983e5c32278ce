#pragma once

#include <memory>
#include <string>

#include "concerto/comm/local/local_group.h"

namespace concerto {

// One rank's end of a LocalGroup.
class LocalCommunicator : public Communicator {
 public:
  LocalCommunicator(std::shared_ptr<LocalGroup> group, int rank) : group_(std::move(group)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return group_->size(); }
  const std::string& name() const override { return group_->name(); }
  std::unique_ptr<Communicator> split(int color, int key, const std::string& name) override;
  CommTicket start_all_to_all(std::span<const View> to, std::span<const View> from) override;
  CommTicket start_all_gather(View mine, std::span<const View> parts) override;
  CommTicket start_reduce_scatter(std::span<const View> parts, View out, Wire wire) override;
  CommTicket start_all_reduce(View inout) override;
  CommTicket start_reduce_to_owners(std::span<const OwnedPiece> pieces, Wire wire) override;
  CommTicket start_broadcast_from_owners(std::span<const OwnedPiece> pieces) override;
  CommTicket start_send(View data, int to) override;
  CommTicket start_recv(View data, int from) override;
  void barrier() override;
  void abort(const std::string& why) override;
  void wait(int64_t ticket) override { group_->wait(rank_, ticket); }
  void drop(int64_t ticket) noexcept override { group_->drop(rank_, ticket); }

 private:
  template <class Fill>
  CommTicket start(Fill&& fill) {
    return {this, group_->start(rank_, traffic_, fill)};
  }
  void check_peer(int peer) const;

  const std::shared_ptr<LocalGroup> group_;
  const int rank_;
};

}  // namespace concerto
