#include "concerto/parallel/token_exchange.h"

#include "concerto/base/part.h"

namespace concerto {

GroupTokenExchange::GroupTokenExchange(Communicator& group)
    : group_(group), parts_(static_cast<size_t>(group.size())) {}

std::span<const View> GroupTokenExchange::token_parts(View all) const {
  for (int r = 0; r < size(); ++r) {
    const Part part = part_of(all.rows(), size(), r);
    parts_[static_cast<size_t>(r)] = all.rows_range(part.begin, part.count);
  }
  return parts_;
}

void GroupTokenExchange::gather(const Context& ctx, View local, View all) const {
  if (ctx.dry_run) return;
  const CommScope scope("gather tokens");
  group_.all_gather(local, token_parts(all));
}

void GroupTokenExchange::reduce_scatter(const Context& ctx, View partial, View local) const {
  if (ctx.dry_run) return;
  const CommScope scope("sum tokens");
  group_.reduce_scatter(token_parts(partial), local);
}

void GroupTokenExchange::gather_parts(const Context& ctx, View mine, View all) const {
  if (ctx.dry_run) return;
  const CommScope scope("gather parts");
  const int64_t rows = mine.rows();
  CHECK(all.rows() == size() * rows, "{} rows of {} ranks, {} each", all.rows(), size(), rows);
  for (int r = 0; r < size(); ++r) parts_[static_cast<size_t>(r)] = all.rows_range(r * rows, rows);
  group_.all_gather(mine, parts_);
}

GroupUnitExchange::GroupUnitExchange(Communicator& group)
    : group_(group), rows_(static_cast<size_t>(group.size())), parts_(static_cast<size_t>(group.size())) {}

int64_t GroupUnitExchange::agree(const Context& ctx, int64_t own) {
  first_ = 0;
  if (ctx.dry_run) return own * group_.size();
  const CommScope scope("count rows of a routing unit");
  own_ = own;
  for (size_t r = 0; r < parts_.size(); ++r) parts_[r] = View(&rows_[r], {1}, DType::kI64);
  group_.all_gather(View(&own_, {1}, DType::kI64), parts_);
  int64_t all = 0;
  for (int r = 0; r < group_.size(); ++r) {
    if (r == rank()) first_ = all;
    all += rows_[static_cast<size_t>(r)];
  }
  return all;
}

void GroupUnitExchange::gather(const Context& ctx, View own, View all) const {
  if (ctx.dry_run) return;
  const CommScope scope("gather a routing unit");
  int64_t at = 0;
  for (size_t r = 0; r < parts_.size(); ++r) {
    parts_[r] = all.rows_range(at, rows_[r]);
    at += rows_[r];
  }
  CHECK(at == all.rows() && own.rows() == rows_[static_cast<size_t>(rank())], "{} rows of {} agreed", all.rows(), at);
  group_.all_gather(own, parts_);
}

}  // namespace concerto
