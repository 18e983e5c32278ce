// The exchanges of tensor parallel layers (layers/token_exchange.h) over a communicator. In a dry run nothing is sent.
#pragma once

#include <vector>

#include "concerto/comm/communicator.h"
#include "concerto/layers/token_exchange.h"

namespace concerto {

class GroupTokenExchange final : public TokenExchange {
 public:
  explicit GroupTokenExchange(Communicator& group);  // the ranks that share a micro-batch's tokens
  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  void gather(const Context& ctx, View local, View all) const override;
  void reduce_scatter(const Context& ctx, View partial, View local) const override;
  void gather_parts(const Context& ctx, View mine, View all) const override;

 private:
  std::span<const View> token_parts(View all) const;  // each rank's rows

  Communicator& group_;
  mutable std::vector<View> parts_;  // of the exchange under way
};

// The tokens of a routing unit that data parallel ranks share.
class DataRowExchange final : public RowExchange {
 public:
  explicit DataRowExchange(Communicator& dp);
  // How many tokens each rank has: called by all of them, with its own number, before they gather.
  void share_counts(int64_t own);
  int64_t total() const { return total_; }
  int64_t begin() const { return begin_; }  // tokens of the ranks before this one
  bool first() const { return dp_.rank() == 0; }
  void gather(const Context& ctx, View own, View all) const override;

 private:
  Communicator& dp_;
  std::vector<int64_t> counts_;  // [ranks]
  int64_t total_ = 0, begin_ = 0;
  mutable std::vector<View> parts_;
};

}  // namespace concerto
