#include "concerto/arch/stage_split.h"

#include <algorithm>
#include <numeric>

#include "concerto/base/error.h"

namespace concerto {
namespace {

int64_t attention_weights(const ModelConfig& c) {
  const int64_t q = c.num_attention_heads * c.head_dim, kv = c.num_key_value_heads * c.head_dim;
  return c.hidden_size * (2 * q + 2 * kv);
}

int64_t mlp_weights(const ModelConfig& c, int64_t width) { return 3 * c.hidden_size * width; }

// Costs of the layers, and what the last stage bears besides.
class Balance {
 public:
  Balance(const ModelConfig& c, int stages) : stages_(stages), tail_(head_forward_flops(c)) {
    layers_ = c.num_hidden_layers;
    before_.resize(static_cast<size_t>(layers_) + 1);
    for (int64_t i = 0; i < layers_; ++i)
      before_[static_cast<size_t>(i) + 1] = before_[static_cast<size_t>(i)] + layer_forward_flops(c, i);
  }

  // Ends of the stages.
  std::vector<int64_t> solve() const {
    const int64_t limit = least_greatest_cost();
    const size_t width = static_cast<size_t>(layers_) + 1;
    // best[s][i]: least sum of squares of stages s.. that take layers i..; end[s][i]: where stage s then ends.
    std::vector<std::vector<Square>> best(static_cast<size_t>(stages_) + 1, std::vector<Square>(width, kNone));
    std::vector<std::vector<int64_t>> end(static_cast<size_t>(stages_), std::vector<int64_t>(width));
    best[static_cast<size_t>(stages_)][static_cast<size_t>(layers_)] = 0;
    for (int s = stages_ - 1; s >= 0; --s)
      for (int64_t i = 0; i <= layers_; ++i)
        for (int64_t j = i; j <= layers_; ++j) {
          const int64_t stage = cost(s, i, j);
          if (stage > limit) break;
          const Square rest = best[static_cast<size_t>(s) + 1][static_cast<size_t>(j)];
          if (rest == kNone) continue;
          const Square sum = static_cast<Square>(stage) * stage + rest;
          Square& least = best[static_cast<size_t>(s)][static_cast<size_t>(i)];
          if (least != kNone && sum >= least) continue;
          least = sum;
          end[static_cast<size_t>(s)][static_cast<size_t>(i)] = j;
        }
    std::vector<int64_t> ends;
    for (int s = 0; s < stages_; ++s)
      ends.push_back(end[static_cast<size_t>(s)][static_cast<size_t>(s ? ends.back() : 0)]);
    return ends;
  }

 private:
  using Square = __int128;
  static constexpr Square kNone = -1;

  int64_t cost(int stage, int64_t begin, int64_t end) const {
    return before_[static_cast<size_t>(end)] - before_[static_cast<size_t>(begin)] + (stage == stages_ - 1 ? tail_ : 0);
  }

  // Whether stages that take all they can from the front leave the last one no more than `limit`.
  bool fits(int64_t limit) const {
    int64_t end = 0;
    for (int s = 0; s < stages_ - 1; ++s) {
      const int64_t begin = end;
      while (end < layers_ && cost(s, begin, end + 1) <= limit) ++end;
    }
    return cost(stages_ - 1, end, layers_) <= limit;
  }

  int64_t least_greatest_cost() const {
    int64_t low = 0, high = before_.back() + tail_;  // high fits
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (fits(middle))
        high = middle;
      else
        low = middle + 1;
    }
    return high;
  }

  int stages_;
  int64_t tail_, layers_ = 0;
  std::vector<int64_t> before_;  // cost of the layers before
};

}  // namespace

int64_t layer_forward_flops(const ModelConfig& c, int64_t layer) {
  int64_t weights = attention_weights(c);
  if (c.is_moe_layer(layer))
    weights += c.hidden_size * c.moe_num_experts + mlp_weights(c, c.moe_k * c.moe_intermediate_size) +
               mlp_weights(c, c.shared_intermediate_size());
  else
    weights += mlp_weights(c, c.intermediate_size);
  return 2 * weights;
}

int64_t head_forward_flops(const ModelConfig& c) {
  const int64_t head = c.vocab_size * c.hidden_size;
  const int64_t depth = 2 * c.hidden_size * c.hidden_size + attention_weights(c) + mlp_weights(c, c.intermediate_size);
  return 2 * (head + c.num_nextn_predict_layers * (depth + head));
}

std::vector<StageSpan> split_stages(const ModelConfig& c, int virtual_stages, const std::vector<int64_t>& by_hand) {
  CHECK(virtual_stages > 0, "{} stages", virtual_stages);
  std::vector<int64_t> ends;
  if (by_hand.empty()) {
    ends = Balance(c, virtual_stages).solve();
  } else {
    CHECK(by_hand.size() == static_cast<size_t>(virtual_stages), "{} numbers of layers for {} stages", by_hand.size(),
          virtual_stages);
    ends.resize(by_hand.size());
    std::partial_sum(by_hand.begin(), by_hand.end(), ends.begin());
    CHECK(ends.back() == c.num_hidden_layers && std::is_sorted(ends.begin(), ends.end()),
          "{} layers in stages, {} in the model", ends.back(), c.num_hidden_layers);
  }
  std::vector<StageSpan> spans(ends.size());
  for (size_t s = 0; s < ends.size(); ++s) spans[s] = {s ? ends[s - 1] : 0, ends[s], s == 0, s + 1 == ends.size()};
  return spans;
}

std::vector<StageSpan> stages_of(const std::vector<StageSpan>& all, const std::vector<int>& numbers) {
  std::vector<StageSpan> own;
  for (const int v : numbers) own.push_back(all.at(static_cast<size_t>(v)));
  return own;
}

}  // namespace concerto
