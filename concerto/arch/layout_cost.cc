#include "concerto/arch/layout_cost.h"

#include <algorithm>
#include <numeric>

#include "concerto/arch/tensor_owners.h"
#include "concerto/base/error.h"
#include "concerto/base/part.h"

namespace concerto {
namespace {

constexpr int64_t kStoreAlignment = 64;  // elements

int64_t aligned(int64_t n) { return (n + kStoreAlignment - 1) / kStoreAlignment * kStoreAlignment; }

// The ranks that hold the same slices, this rank's number among them, and how many of them may own.
struct ReplicaGroup {
  int size = 1, rank = 0, owners = 1;
};

class Cost {
 public:
  Cost(const ModelConfig& config, const RankWork& work)
      : c_(config), w_(work), specs_(tensor_specs(config, work.plan)), stat_(dtype_bytes(stat_dtype(work.compute))) {
    if (w_.plan.stages.empty()) w_.plan.stages = {{0, c_.num_hidden_layers, true, true}};
    for (const int64_t tokens : w_.micro_batches) {
      tokens_ += tokens;
      own_tokens_ += part_of(tokens, w_.plan.tp, w_.plan.tp_rank).count;
    }
    for (const StageSpan& s : w_.plan.stages) {
      embedding_ = embedding_ || s.embedding;
      head_ = head_ || s.head;
      for (int64_t i = s.first_layer; i < s.last_layer; ++i) {
        ++layers_;
        moe_layers_ += c_.is_moe_layer(i);
      }
    }
    for (const Replicas kind : kReplicaKinds) groups_[static_cast<size_t>(kind)] = group(kind);
    std::array<int, kReplicaKinds.size()> owners{};
    for (size_t i = 0; i < owners.size(); ++i) owners[i] = groups_[i].owners;
    owners_ = tensor_owners(specs_, owners);
  }

  LayoutCost all() {
    hold();
    compute();
    if (w_.plan.tp > 1) exchange_tokens();
    if (dispatch_ranks() > 1) dispatch();
    if (w_.pp > 1) pass_on();
    synchronize();
    return cost_;
  }

 private:
  ReplicaGroup group(Replicas kind) const {
    const int tp = w_.plan.tp, tp_rank = w_.plan.tp_rank, stage_rank = w_.dp_rank * tp + tp_rank;
    switch (kind) {
      case Replicas::kDp:
        return {w_.dp, w_.dp_rank, w_.dp};
      case Replicas::kKv: {
        const int sharers = std::max(1, tp / static_cast<int>(c_.num_key_value_heads)), n = w_.dp * sharers;
        return {n, w_.dp_rank * sharers + tp_rank % sharers, n};
      }
      case Replicas::kStage:
        return {w_.dp * tp, stage_rank, w_.dp * tp};
      case Replicas::kEdp: {
        const int n = w_.dp * tp / dispatch_ranks();
        return {n, stage_rank / dispatch_ranks(), n};
      }
      case Replicas::kEmbedding:
        return {w_.pp > 1 ? 2 * w_.dp : w_.dp, w_.dp_rank + (w_.pp_rank > 0 ? w_.dp : 0), w_.dp};
    }
    return {};
  }

  int dispatch_ranks() const { return w_.plan.ep * w_.plan.etp; }
  int dispatch_rank() const { return w_.plan.ep_rank * w_.plan.etp + w_.plan.etp_rank; }
  const ReplicaGroup& group_of(size_t i) const { return groups_[static_cast<size_t>(specs_[i].replicas)]; }
  bool owns(size_t i) const { return owners_[i] == group_of(i).rank; }

  // ---- What it holds.

  // Elements of the specs that `counts` takes, laid out as the store does.
  template <class Counts>
  int64_t laid_out(Counts counts) const {
    int64_t elements = 0;
    for (size_t i = 0; i < specs_.size(); ++i) {
      const bool joined = i > 0 && specs_[i].fused >= 0 && specs_[i - 1].fused == specs_[i].fused;
      if (!joined) elements = aligned(elements);
      if (counts(i)) elements += specs_[i].shape.elements();
    }
    return aligned(elements);
  }

  // ZeRO-2: what backward works in, the greatest of the layers and all that is outside of them.
  int64_t working_gradients() const {
    const auto layer_of = [&](size_t i) { return specs_[i].name.starts_with("model.layers.") ? specs_[i].layer : -1; };
    int64_t most = 0;
    for (size_t i = 0; i < specs_.size(); ++i)
      if (const int layer = layer_of(i); layer >= 0 && (i == 0 || layer_of(i - 1) != layer))
        most = std::max(most, laid_out([&](size_t j) { return layer_of(j) == layer; }));
    return most + laid_out([&](size_t i) { return layer_of(i) < 0; });
  }

  void hold() {
    const auto all = [](size_t) { return true; };
    const auto owned = [&](size_t i) { return owns(i); };
    const int64_t elements = laid_out(all);
    cost_.weight_bytes = elements * stat_;
    cost_.gradient_bytes = (w_.zero < 2 ? elements : laid_out(owned) + working_gradients()) * stat_;
    const DType moments = w_.moments == DType::kBF16 ? DType::kBF16 : stat_dtype(w_.compute);
    cost_.moment_bytes = 2 * dtype_bytes(moments) * (w_.zero < 1 ? elements : laid_out(owned));
    if (w_.compute == stat_dtype(w_.compute)) return;
    const bool tied =
        std::none_of(specs_.begin(), specs_.end(), [](const TensorSpec& s) { return s.role == TensorRole::kHead; });
    const int64_t matrices = laid_out([&](size_t i) {
      const TensorSpec& s = specs_[i];
      return s.shape.rank() >= 2 && !s.keep_f32 && (!w_.packs || tied || s.role != TensorRole::kEmbedding);
    });
    cost_.copy_bytes = matrices * dtype_bytes(w_.compute) * (w_.packs ? 2 : 1);
  }

  // ---- What it computes.

  bool again_attention() const { return w_.recompute == Recompute::kFull; }
  bool again_mlp() const { return w_.recompute != Recompute::kNone; }

  void compute() {
    const double own = static_cast<double>(own_tokens_), all = static_cast<double>(tokens_);
    const double attention = again_attention() ? 4 : 3, mlp = again_mlp() ? 4 : 3;
    const double router = again_mlp() && !w_.global_routing ? 4 : 3;
    const TensorSpec* expert = nullptr;  // any stands for all: they have one shape
    double expert_elements = 0;
    for (const TensorSpec& s : specs_) {
      const double elements = static_cast<double>(s.shape.rank() >= 2 ? s.shape.elements() : 0);
      switch (s.role) {
        case TensorRole::kAttentionIn:
        case TensorRole::kAttentionOut:
          cost_.linear_flops += 2 * attention * all * elements;
          break;
        case TensorRole::kMlpIn:
        case TensorRole::kMlpDown:
        case TensorRole::kSharedIn:
        case TensorRole::kSharedDown:
          cost_.linear_flops += 2 * mlp * all * elements;
          break;
        case TensorRole::kMtpProjection:
          cost_.linear_flops += 2 * 3 * own * elements;
          break;
        case TensorRole::kRouter:
          cost_.router_flops += 2 * router * own * elements;
          break;
        case TensorRole::kExpertIn:
        case TensorRole::kExpertDown:
          if (!expert) expert = &s;
          if (s.expert == expert->expert && s.layer == expert->layer) expert_elements += elements;
          break;
        case TensorRole::kEmbedding:
        case TensorRole::kHead:
          if (head_ && c_.tie_word_embeddings == (s.role == TensorRole::kEmbedding))
            cost_.head_flops = 2 * 3 * all * elements * static_cast<double>(1 + c_.num_nextn_predict_layers);
          break;
        default:
          break;
      }
    }
    const auto received = received_rows();
    cost_.expert_flops = 2 * mlp * expert_elements * std::accumulate(received.begin(), received.end(), 0.0);
  }

  // ---- What it sends.

  void exchange_tokens() {
    const int64_t others = w_.plan.tp - 1, hidden = c_.hidden_size;
    const int64_t gather = own_tokens_ * hidden * dtype_bytes(w_.compute) * others;
    const int64_t sum = (tokens_ - own_tokens_) * hidden * stat_;
    const int64_t mtp = head_ ? c_.num_nextn_predict_layers : 0;
    const int64_t shared = c_.moe_num_shared_experts > 0 ? moe_layers_ : 0;
    const int64_t mlps = layers_ - moe_layers_ + shared + mtp, attentions = layers_ + mtp;
    const int64_t embeddings = (embedding_ ? 1 : 0) + mtp, heads = head_ ? 1 + mtp : 0;
    const int64_t forwards = attentions * (again_attention() ? 2 : 1) + mlps * (again_mlp() ? 2 : 1);
    cost_.tp_gather_bytes = gather * (forwards + 2 * (attentions + mlps) + embeddings + heads) +
                            heads * 16 * tokens_ * others +
                            moe_layers_ * own_tokens_ * c_.moe_num_experts * stat_ * others;
    cost_.tp_reduce_scatter_bytes = sum * (forwards + attentions + mlps + embeddings + heads);
  }

  // By sender; even loads where none are given.
  std::vector<double> received_rows() const {
    if (!w_.received_rows.empty() || moe_layers_ == 0) return w_.received_rows;
    double local = 0;
    for (const double rows : rows_by_owner(w_.plan.ep_rank)) local += rows;
    return std::vector<double>(static_cast<size_t>(dispatch_ranks()), local);
  }
  // Own rows to each expert of an ep rank.
  std::vector<double> rows_by_owner(int ep_rank) const {
    const double even =
        static_cast<double>(own_tokens_ * c_.moe_k * moe_layers_) / static_cast<double>(c_.moe_num_experts);
    std::vector<double> rows;
    for (const int e : local_experts(c_, w_.plan, ep_rank))
      rows.push_back(w_.sent_rows.empty() ? even : w_.sent_rows.at(static_cast<size_t>(e)));
    return rows;
  }

  void dispatch() {
    if (moe_layers_ == 0) return;
    const double row = static_cast<double>(c_.hidden_size * dtype_bytes(w_.compute)),
                 weight = static_cast<double>(stat_);
    const double forwards = again_mlp() ? 2 : 1;
    double sent = 0, received = 0;  // to and from other ranks
    int64_t counts = 0;
    for (int r = 0; r < w_.plan.ep; ++r) {
      const std::vector<double> rows = rows_by_owner(r);
      const int ranks = w_.plan.etp - (r == w_.plan.ep_rank ? 1 : 0);
      sent += ranks * std::accumulate(rows.begin(), rows.end(), 0.0);
      counts += ranks * std::ssize(rows) * 4;
    }
    const std::vector<double> from = received_rows();
    CHECK(std::ssize(from) == dispatch_ranks(), "rows of {} senders, {} ranks", from.size(), dispatch_ranks());
    for (int r = 0; r < dispatch_ranks(); ++r)
      if (r != dispatch_rank()) received += from[static_cast<size_t>(r)];
    const double rows = sent * (forwards * (row + weight) + row) + received * (forwards * row + row + weight);
    cost_.dispatch_bytes =
        static_cast<int64_t>(rows) + counts * moe_layers_ * static_cast<int64_t>(w_.micro_batches.size());
  }

  void pass_on() {
    int64_t forward = 0, backward = 0;
    for (const StageSpan& s : w_.plan.stages) {
      forward += !s.head;
      backward += !s.embedding;
    }
    if (w_.v_shape && w_.pp_rank == w_.pp - 1) --forward, --backward;
    const int64_t hidden = own_tokens_ * c_.hidden_size * dtype_bytes(w_.compute);
    const int64_t pooled = w_.pooled_units * c_.moe_num_experts * static_cast<int64_t>(w_.micro_batches.size());
    cost_.pipeline_bytes =
        forward * (hidden + 16 * pooled) + backward * (hidden + (w_.trains_pool ? stat_ * pooled : 0));
  }

  void synchronize() {
    const int64_t wire = w_.bf16_gradients && stat_ == 4 ? 2 : stat_;
    const int64_t sums = w_.zero < 2 ? 1 : static_cast<int64_t>(w_.micro_batches.size());
    for (size_t i = 0; i < specs_.size(); ++i) {
      if (!specs_[i].trainable) continue;
      const int64_t elements = specs_[i].shape.elements();
      if (owns(i))
        cost_.broadcast_bytes += elements * stat_ * (group_of(i).size - 1);
      else
        cost_.reduce_to_owners_bytes += elements * wire * sums;
    }
  }

  const ModelConfig& c_;
  RankWork w_;
  std::vector<TensorSpec> specs_;
  int64_t stat_;
  std::array<ReplicaGroup, kReplicaKinds.size()> groups_{};
  std::vector<int> owners_;
  int64_t tokens_ = 0, own_tokens_ = 0, layers_ = 0, moe_layers_ = 0;
  bool embedding_ = false, head_ = false;
  LayoutCost cost_;
};

}  // namespace

LayoutCost layout_cost(const ModelConfig& config, const RankWork& work) { return Cost(config, work).all(); }

}  // namespace concerto
