#include "concerto/schedule/orders.h"

#include <algorithm>

namespace concerto {
namespace {

// A rank's list under construction: the next micro-batch of each kind and chunk goes to its end. Micro-batches from
// `count` on, which a builder may play to keep its pattern whole, are left out.
class OrderOfRank {
 public:
  OrderOfRank(std::vector<Action>& out, int chunks, int64_t count) : out_(out), count_(count), next_(chunks) {}

  void forward(int chunk = 0) { add(ActionKind::kForward, next_[chunk].forward, chunk); }
  void whole(int chunk = 0) { add(ActionKind::kBackward, next_[chunk].input, chunk); }
  void input(int chunk = 0) { add(ActionKind::kBackwardInput, next_[chunk].input, chunk); }
  void weight(int chunk = 0) { add(ActionKind::kBackwardWeight, next_[chunk].weight, chunk); }
  void backward(bool split, int chunk = 0) {
    if (!split) return whole(chunk);
    input(chunk);
    weight(chunk);
  }
  int64_t forwards(int chunk) const { return next_[chunk].forward; }
  int64_t inputs(int chunk) const { return next_[chunk].input; }
  int64_t weights(int chunk) const { return next_[chunk].weight; }

 private:
  struct Next {
    int64_t forward = 0, input = 0, weight = 0;
  };
  void add(ActionKind kind, int64_t& next, int chunk) {
    if (next < count_) out_.push_back({kind, static_cast<int32_t>(next), chunk});
    ++next;
  }

  std::vector<Action>& out_;
  int64_t count_;
  std::vector<Next> next_;
};

// One rank has nobody to wait for: each micro-batch in turn takes one slot of each chunk.
void in_turn(OrderOfRank o, const PipelineSchedule& s) {
  for (int64_t m = 0; m < s.micro_batches; ++m) {
    for (int c = 0; c < s.chunks; ++c) o.forward(c);
    for (int c = s.chunks; c-- > 0;) o.backward(s.split, c);
  }
}

void one_forward_one_backward(OrderOfRank o, const PipelineSchedule& s, int rank) {
  for (int i = 0; i < s.pp - 1 - rank; ++i) o.forward();
  for (int64_t m = 0; m < s.micro_batches; ++m) {
    o.forward();
    o.whole();
  }
}

// ZB-H1: a rank further down starts later and has fewer forwards ahead; what room this leaves keeps W for the end, when
// the rank would wait for the ranks after it.
void zero_bubble(OrderOfRank o, const PipelineSchedule& s, int rank) {
  for (int i = 0; i < s.pp - 1 - rank; ++i) o.forward();
  for (int64_t m = 0; m < s.micro_batches; ++m) {
    o.forward();
    o.input();
    if (m >= rank) o.weight();
  }
  while (o.weights(0) < s.micro_batches) o.weight();
}

// The V: a rank's two chunks stand pp - 1 - rank stages before the turn and as many behind it. `count`: at least the
// 2 pp - 1 micro-batches that the pattern wants.
void zero_bubble_v(OrderOfRank o, int pp, int64_t count, int rank) {
  const int below = pp - rank;  // ranks from here to the turn, this one included
  for (int i = 0; i < 2 * below - 1; ++i) o.forward(0);
  for (int i = 0; i < rank; ++i) {
    o.forward(1);
    o.forward(0);
  }
  for (int i = 0; i < below; ++i) {
    o.forward(1);
    o.backward(true, 1);
  }
  while (o.forwards(1) < count) {
    o.backward(true, 0);
    if (o.forwards(0) < count) o.forward(0);
    o.forward(1);
    o.backward(true, 1);
  }
  for (int i = 0; i < rank; ++i) {
    o.input(0);
    o.input(1);
  }
  for (int i = 0; i < below; ++i) {
    o.input(0);
    o.weight(0);
  }
  for (const int chunk : {1, 0})
    while (o.weights(chunk) < count) o.weight(chunk);
}

// Chunks of the n-th forward (or, from the last chunk to the first, backward) of a rank.
std::vector<int> chunks_in_groups(const PipelineSchedule& s, bool backward) {
  std::vector<int> order;
  for (const int64_t group : interleaved_groups(s.micro_batches, s.pp))
    for (int c = 0; c < s.chunks; ++c) order.insert(order.end(), group, backward ? s.chunks - 1 - c : c);
  return order;
}

void interleaved(OrderOfRank o, const PipelineSchedule& s, int rank) {
  const std::vector<int> forward = chunks_in_groups(s, false), backward = chunks_in_groups(s, true);
  const int64_t total = static_cast<int64_t>(forward.size());
  const int64_t ahead = std::min(in_flight_bound(s, rank) - 1, total);
  for (int64_t i = 0; i < ahead; ++i) o.forward(forward[i]);
  for (int64_t i = 0; i < total; ++i) {
    if (ahead + i < total) o.forward(forward[ahead + i]);
    o.whole(backward[i]);
  }
}

// All forwards of a chunk, then of the next; then backward, which need not wait for all micro-batches of a chunk.
void all_forwards_first(OrderOfRank o, const PipelineSchedule& s, int rank) {
  const int64_t m = s.micro_batches;
  for (int c = 0; c < s.chunks; ++c)
    for (int64_t i = 0; i < m; ++i) o.forward(c);
  if (!s.v_shape) {
    for (const int c : chunks_in_groups(s, true)) o.backward(s.split, c);
    return;
  }
  // Until the first micro-batch is back from the turn there is time for W of the second chunk.
  const int64_t ahead = std::min<int64_t>(s.pp - rank, m);
  for (int64_t i = 0; i < ahead; ++i) o.backward(true, 1);
  while (o.inputs(1) < m) {
    o.input(0);
    o.input(1);
  }
  while (o.inputs(0) < m) o.backward(true, 0);
  for (const int chunk : {1, 0})
    while (o.weights(chunk) < m) o.weight(chunk);
}

}  // namespace

std::vector<int64_t> interleaved_groups(int64_t micro_batches, int pp) {
  const int64_t count = std::max<int64_t>(micro_batches / pp, 1);
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < count; ++i)  // the larger ones last: they fill less when the pipeline fills
    sizes.push_back(micro_batches / count + (i >= count - micro_batches % count ? 1 : 0));
  return sizes;
}

void order_computes(PipelineSchedule& s) {
  s.ranks.assign(s.pp, {});
  for (int rank = 0; rank < s.pp; ++rank) {
    const int64_t pattern = s.v_shape && !s.together ? std::max<int64_t>(s.micro_batches, 2 * s.pp - 1) : 0;
    const OrderOfRank o(s.ranks[rank], s.chunks, s.micro_batches);
    if (s.together)
      all_forwards_first(o, s, rank);
    else if (s.pp == 1)
      in_turn(o, s);
    else if (s.v_shape)
      zero_bubble_v(o, s.pp, pattern, rank);
    else if (s.split)
      zero_bubble(o, s, rank);
    else if (s.chunks > 1)
      interleaved(o, s, rank);
    else
      one_forward_one_backward(o, s, rank);
  }
}

}  // namespace concerto
