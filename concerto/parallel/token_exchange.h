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

// A routing unit over data parallel ranks.
class GroupUnitExchange final : public UnitExchange {
 public:
  explicit GroupUnitExchange(Communicator& group);
  // All ranks together, before rows are gathered: each has `own` rows. Gives the rows of all; in a dry run as if every
  // rank had as many.
  int64_t agree(const Context& ctx, int64_t own);
  int rank() const override { return group_.rank(); }
  int64_t first_row() const override { return first_; }
  void gather(const Context& ctx, View own, View all) const override;

 private:
  Communicator& group_;
  std::vector<int64_t> rows_;  // of each rank
  int64_t own_ = 0, first_ = 0;
  mutable std::vector<View> parts_;
};

}  // namespace concerto
