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

DataRowExchange::DataRowExchange(Communicator& dp)
    : dp_(dp), counts_(static_cast<size_t>(dp.size())), parts_(static_cast<size_t>(dp.size())) {}

void DataRowExchange::share_counts(int64_t own) {
  for (size_t r = 0; r < parts_.size(); ++r) parts_[r] = View(&counts_[r], {1}, DType::kI64);
  dp_.all_gather(View(&own, {1}, DType::kI64), parts_);
  total_ = begin_ = 0;
  for (size_t r = 0; r < counts_.size(); ++r) {
    if (static_cast<int>(r) == dp_.rank()) begin_ = total_;
    total_ += counts_[r];
  }
}

void DataRowExchange::gather(const Context& ctx, View own, View all) const {
  if (ctx.dry_run) return;
  CHECK(all.rows() == total_ && own.rows() == counts_[static_cast<size_t>(dp_.rank())], "{} rows of {}", own.rows(),
        all.rows());
  int64_t at = 0;
  for (size_t r = 0; r < parts_.size(); ++r) {
    parts_[r] = all.rows_range(at, counts_[r]);
    at += counts_[r];
  }
  dp_.all_gather(own, parts_);
}

}  // namespace concerto
