#pragma once

#include <deque>
#include <memory>
#include <string>

#include "concerto/comm/mpi/mpi_watch.h"

namespace concerto {

// Every operation is messages between pairs of ranks (MpiTransfer). A group is made by MPI_Comm_split, in O(log n)
// messages a rank.
class MpiCommunicator : public Communicator {
 public:
  // Takes `comm` over. Called by all its ranks.
  MpiCommunicator(std::shared_ptr<MpiWatch> watch, MPI_Comm comm, std::string name, uint64_t id);
  ~MpiCommunicator() override;
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const std::string& name() const override { return group_.name; }
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
  void abort(const std::string& why) override { watch_->abort(why); }
  void wait(int64_t ticket) override;
  void drop(int64_t ticket) noexcept override;

 private:
  struct Entry {
    Operation operation;
    MpiTransfer transfer;
    bool open = false;
  };
  template <class Fill>
  CommTicket start(Fill&& fill);
  void begin(Entry& entry);
  void check_peer(int peer) const;
  void note(ActionPhase phase, const Operation& operation);
  std::string where(const Operation& operation) const;
  std::string absent(const Entry& entry) const;
  // Runs `call`; a Fault of MPI ends the job.
  template <class Call>
  void guarded(const Entry& entry, Call&& call);

  const std::shared_ptr<MpiWatch> watch_;
  const MPI_Comm comm_;
  int rank_ = 0, size_ = 0;
  MpiWatch::Group group_;
  std::deque<Entry> entries_;             // ticket i is entries_[i]
  std::vector<int64_t> sent_, received_;  // messages to and from each rank
  uint64_t splits_ = 0;
};

}  // namespace concerto
