#include "concerto/optim/optimizer.h"

#include <algorithm>
#include <cmath>
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

Optimizer::Optimizer(ParameterStore& store, const OptimizerSection& settings, uint64_t seed)
    : store_(store), settings_(settings), seed_(seed) {
  const auto& specs = store.specs();
  const int n = store.size();
  for (int i = 0; i < n;) {
    int last = i;
    const bool join = settings.name == OptimizerName::kAdamW && specs[i].fused >= 0;
    while (join && last + 1 < n && specs[last + 1].fused == specs[i].fused) ++last;
    const bool frozen = settings.freeze_router && specs[i].role == TensorRole::kRouter;
    if (specs[i].trainable && !frozen) add_piece(i, last);
    i = last + 1;
  }
  size_t most = 0;
  for (const Piece& p : pieces_) most = std::max(most, p.ends.size());
  if (!pieces_.empty() && pieces_[0].m.dtype == DType::kBF16) keys_.resize(most);
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
  pieces_.push_back({.w = flat(store_.master(first), elements),
                     .m = flat(store_.moment1(first), elements),
                     .v = flat(store_.moment2(first), elements),
                     .grad = flat(store_.gradient(first), elements),
                     .copy = flat(store_.copy(first), elements),
                     .packed = settings_.name == OptimizerName::kAdamW ? store_.packed_from(first) : PackedWeight{},
                     .decays = settings_.decay == Decay::kAll || spec.decays_as_matrix(),
                     .router = spec.role == TensorRole::kRouter,
                     .streams = std::move(streams),
                     .ends = std::move(ends)});
}

double Optimizer::gradient_norm(const Context& ctx) const {
  double sum = 0;
  const View out(&sum, {1}, DType::kF64);
  for (const Piece& p : pieces_) sum_squares(ctx, {.x = p.grad, .out = out});
  return std::sqrt(sum);
}

void Optimizer::step(const Context& ctx, int64_t step, double lr, double norm) const {
  const OptimizerSection& o = settings_;
  const double clip = o.clip_norm > 0 ? std::min(1.0, o.clip_norm / (norm + 1e-6)) : 1.0;
  const double t = static_cast<double>(step);
  for (const Piece& p : pieces_) {
    for (size_t i = 0; i < p.ends.size() && !keys_.empty(); ++i)
      keys_[i] = rounding_key(seed_, p.streams[i], static_cast<uint64_t>(step));
    const AdamStep args{
        .w = p.w,
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
    if (o.name == OptimizerName::kLamb)
      lamb_step(ctx, args);
    else
      adamw_step(ctx, args);
  }
  if (o.name == OptimizerName::kLamb) store_.packed_copies_changed();
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
