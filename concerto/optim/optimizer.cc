#include "concerto/optim/optimizer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>

#include "concerto/base/rng.h"
#include "concerto/ops/elementwise.h"
#include "concerto/ops/optimizer_step.h"
#include "concerto/tensor/first_touch.h"

namespace concerto {
namespace {

View flat(View first, int64_t elements) {
  if (!first) return {};
  View v = first;
  v.shape = Shape{elements};
  v.row_stride = elements;
  return v;
}

Extent whole(const View& v) {
  char* const begin = static_cast<char*>(v.data);
  return {begin, begin + v.bytes(), begin};
}

}  // namespace

Optimizer::Optimizer(ParameterStore& store, const OptimizerSection& settings, uint64_t seed, GradientSync* sync)
    : store_(store), settings_(settings), seed_(seed), sync_(sync) {
  const auto& specs = store.specs();
  const int n = store.size();
  const auto updated = [&](int i) { return is_trained(i) && store.updates(i); };
  for (int i = 0; i < n;) {
    int last = i;
    const bool join = settings.name == OptimizerName::kAdamW && specs[i].fused >= 0;
    while (join && updated(i) && last + 1 < n && specs[last + 1].fused == specs[i].fused && updated(last + 1)) ++last;
    if (updated(i)) add_piece(i, last);
    i = last + 1;
  }
  size_t most = 0;
  for (const Piece& p : pieces_) most = std::max(most, p.ends.size());
  if (!pieces_.empty() && pieces_[0].m.dtype == DType::kBF16) keys_.resize(most);
  squares_.resize(static_cast<size_t>(sync ? sync->tensors() : n));
  if (settings.name == OptimizerName::kLamb && sync) lamb_norms_.resize(2 * squares_.size());
}

bool Optimizer::is_trained(int i) const {
  const TensorSpec& s = store_.specs()[i];
  return s.trainable && !(settings_.freeze_router && s.role == TensorRole::kRouter);
}

void Optimizer::add_piece(int first, int last) {
  int64_t elements = 0;
  std::vector<uint64_t> streams;
  std::vector<int64_t> ends;
  for (int i = first; i <= last; ++i) {
    elements += store_.specs()[i].shape.elements();
    streams.push_back(hash_name("moments:" + store_.specs()[i].name));
    ends.push_back(elements);
  }
  const TensorSpec& spec = store_.specs()[first];
  // A packed copy is written as a whole; of a run that this rank owns in part it is made anew.
  const PackedWeight packed = store_.packed_from(first);
  const bool whole_run = packed && packed.groups * packed.n * packed.k == elements;
  pieces_.push_back({.first = first,
                     .w = flat(store_.master(first), elements),
                     .m = flat(store_.moment1(first), elements),
                     .v = flat(store_.moment2(first), elements),
                     .grad = flat(store_.gradient(first), elements),
                     .copy = flat(store_.copy(first), elements),
                     .packed = settings_.name == OptimizerName::kAdamW && whole_run ? packed : PackedWeight{},
                     .decays = settings_.decay == Decay::kAll || spec.decays_as_matrix(),
                     .router = spec.role == TensorRole::kRouter,
                     .streams = std::move(streams),
                     .ends = std::move(ends)});
}

double Optimizer::gradient_norm(const Context& ctx) const {
  std::fill(squares_.begin(), squares_.end(), 0.0);
  for (int i = 0; i < store_.size(); ++i) {
    if (!is_trained(i) || (sync_ && !sync_->owns(i))) continue;
    double& sum = squares_[static_cast<size_t>(sync_ ? sync_->place(i) : i)];
    sum_squares(ctx,
                {.x = flat(store_.gradient(i), store_.gradient(i).elements()), .out = View(&sum, {1}, DType::kF64)});
  }
  if (sync_ && !ctx.dry_run) sync_->sum(squares_);
  return std::sqrt(std::accumulate(squares_.begin(), squares_.end(), 0.0));
}

AdamStep Optimizer::step_of(const Piece& p, int64_t step, double lr, double clip) const {
  const OptimizerSection& o = settings_;
  const double t = static_cast<double>(step);
  for (size_t i = 0; i < p.ends.size() && !keys_.empty(); ++i)
    keys_[i] = rounding_key(seed_, p.streams[i], static_cast<uint64_t>(step));
  return {.w = p.w,
          .m = p.m,
          .v = p.v,
          .grad = p.grad,
          .copy = p.copy,
          .packed = p.packed,
          .lr = lr * (p.router ? o.router_lr_ratio : 1.0),
          .beta1 = o.beta1,
          .beta2 = o.beta2,
          .eps = o.eps,
          .weight_decay = p.decays ? o.weight_decay : 0.0,
          .c1 = 1.0 - std::pow(o.beta1, t),
          .c2 = 1.0 - std::pow(o.beta2, t),
          .grad_scale = clip,
          .rounding = {.keys = keys_.data(), .ends = p.ends.data(), .count = static_cast<int64_t>(p.ends.size())}};
}

void Optimizer::step(const Context& ctx, int64_t step, double lr, double norm) const {
  const double clip = settings_.clip_norm > 0 ? std::min(1.0, settings_.clip_norm / (norm + 1e-6)) : 1.0;
  if (settings_.name == OptimizerName::kLamb)
    lamb(ctx, step, lr, clip);
  else
    for (const Piece& p : pieces_) adamw_step(ctx, step_of(p, step, lr, clip));
  for (const Piece& p : pieces_)
    if (!p.packed && !ctx.dry_run)
      for (size_t i = 0; i < p.ends.size(); ++i) store_.packed_copy_changed(p.first + static_cast<int>(i));
  if (sync_ && !ctx.dry_run) sync_->share_weights();
}

// The trust ratio is of a whole tensor, whoever holds its slices.
void Optimizer::lamb(const Context& ctx, int64_t step, double lr, double clip) const {
  if (!sync_) {
    for (const Piece& p : pieces_) lamb_step(ctx, step_of(p, step, lr, clip));
    return;
  }
  std::fill(lamb_norms_.begin(), lamb_norms_.end(), 0.0);
  std::array<double, 2> not_counted{};
  const auto norms_of = [&](const Piece& p) { return &lamb_norms_[2 * static_cast<size_t>(sync_->place(p.first))]; };
  for (const Piece& p : pieces_)  // of a tensor that many update, its owner's count
    lamb_norms(ctx, {.step = step_of(p, step, lr, clip),
                     .norms = View(sync_->owns(p.first) ? norms_of(p) : not_counted.data(), {2}, DType::kF64)});
  if (!ctx.dry_run) sync_->sum(lamb_norms_);
  for (const Piece& p : pieces_)
    lamb_apply(ctx,
               {.step = step_of(p, step, lr, clip), .trust_ratio = lamb_trust_ratio(norms_of(p)[0], norms_of(p)[1])});
}

// The cpu backend cuts a piece evenly among the threads (but for the ends of blocks), and so is the memory.
void Optimizer::first_touch_state(ThreadPool& pool) const {
  std::vector<Extent> extents;
  for (const Piece& p : pieces_)
    for (const View& v : {p.w, p.m, p.v, p.copy})
      if (v) extents.push_back(whole(v));
  for (int i = 0; i < store_.size(); ++i) {
    const PackedWeight p = store_.packed_from(i);
    if (!p) continue;
    extents.push_back({p.forward, p.forward + packed_forward_bytes(*p.packing, p.groups, p.n, p.k), p.forward});
    extents.push_back({p.backward, p.backward + packed_backward_bytes(*p.packing, p.groups, p.n, p.k), p.backward});
  }
  first_touch(pool, extents);
}

void Optimizer::first_touch_gradients(ThreadPool& pool) const {
  std::vector<Extent> extents;
  for (const Piece& p : pieces_) extents.push_back(whole(p.grad));
  first_touch(pool, extents);
}

int64_t Optimizer::scratch_bytes(Context ctx) const {
  Arena counted;
  ctx.scratch = &counted;
  ctx.dry_run = true;
  gradient_norm(ctx);
  step(ctx, 1, 0, 0);
  return counted.high_water();
}

}  // namespace concerto
