#include "concerto/config/model_fields.h"

#include <algorithm>
#include <cstdlib>

namespace concerto {
namespace {

constexpr double kMaxWidth = 1 << 24;  // far above any model, low enough that products of two stay exact
constexpr double kMaxLayers = 1 << 16;
constexpr double kMaxExperts = 1 << 16;

using F = Field<ModelConfig>;

const EnumNames kModelTypeNames = {
    {static_cast<int>(ModelType::kErnie45), "ernie4_5", "dense text model"},
    {static_cast<int>(ModelType::kErnie45Moe), "ernie4_5_moe", "text mixture of experts"}};
const EnumNames kMtpHiddenNames = {
    {static_cast<int>(MtpHidden::kPreNorm), "pre_norm", "before the final norm, as Baidu's trainers do"},
    {static_cast<int>(MtpHidden::kPostNorm), "post_norm", "after it, which fits the released heads best"}};
const EnumNames kMtpPositionsNames = {{static_cast<int>(MtpPositions::kMain), "main", "those of the main model"},
                                      {static_cast<int>(MtpPositions::kShifted), "shifted", "shifted by depth + 1"}};
const EnumNames kGateNames = {
    {static_cast<int>(RouterGate::kTopK), "topk", "the moe_k best"},
    {static_cast<int>(RouterGate::kTopK), "topk_fused", ""},
    {static_cast<int>(RouterGate::kTopK), "top2_fused", ""},  // despite its name
    {static_cast<int>(RouterGate::kTop2), "top2", "the two best, as GShard does; with sinkhorn_2gate"}};
const EnumNames kScoringNames = {
    {static_cast<int>(RouterScoring::kSoftmax), "softmax", "over all experts, or inside each group"},
    {static_cast<int>(RouterScoring::kSigmoid), "sigmoid", "each expert for itself"}};
const EnumNames kDropOrderNames = {
    {static_cast<int>(TokenDrop::kRankMajor), "rank_major", "first choices of all tokens, then second ones, as Paddle"},
    {static_cast<int>(TokenDrop::kTokenMajor), "token_major", "token by token, as the released PyTorch code"}};

void dense_fields(std::vector<F>& f) {
  f.push_back(F(
      "model", "model_type", [](ModelConfig& c) -> Slot { return enum_slot(c.model_type, kModelTypeNames); },
      "kind of model"));
  f.push_back(F(
                  "model", "vocab_size", [](ModelConfig& c) -> Slot { return &c.vocab_size; }, "rows of the embedding")
                  .range(1, kMaxWidth));
  f.push_back(
      F(
          "model", "hidden_size", [](ModelConfig& c) -> Slot { return &c.hidden_size; }, "width of the hidden state")
          .range(1, kMaxWidth));
  f.push_back(F(
                  "model", "intermediate_size", [](ModelConfig& c) -> Slot { return &c.intermediate_size; },
                  "inner width of a dense MLP")
                  .range(1, kMaxWidth)
                  .also({"ffn_hidden_size"}));
  f.push_back(
      F(
          "model", "num_hidden_layers", [](ModelConfig& c) -> Slot { return &c.num_hidden_layers; }, "decoder layers")
          .range(1, kMaxLayers)
          .also({"num_layers"}));
  f.push_back(
      F(
          "model", "num_attention_heads", [](ModelConfig& c) -> Slot { return &c.num_attention_heads; }, "query heads")
          .range(1, kMaxWidth));
  f.push_back(F(
                  "model", "num_key_value_heads", [](ModelConfig& c) -> Slot { return &c.num_key_value_heads; },
                  "key and value heads; null: as many as query heads")
                  .range(1, kMaxWidth)
                  .also({"num_query_groups"}));
  f.push_back(
      F(
          "model", "head_dim", [](ModelConfig& c) -> Slot { return &c.head_dim; },
          "width of a head; 0: hidden_size / num_attention_heads. Missing: 128 in a dense model, 0 in a MoE model")
          .range(0, kMaxWidth)
          .also({"kv_channels"}));
  f.push_back(
      F(
          "model", "hidden_act", [](ModelConfig& c) -> Slot { return &c.hidden_act; }, "activation of the gated MLPs")
          .one_of({"silu"}));
  f.push_back(F(
                  "model", "max_position_embeddings", [](ModelConfig& c) -> Slot { return &c.max_position_embeddings; },
                  "longest sequence")
                  .range(1, 1 << 30));
  f.push_back(F(
                  "model", "initializer_range", [](ModelConfig& c) -> Slot { return &c.initializer_range; },
                  "standard deviation of `init_method: huggingface`")
                  .range(0, 1e3)
                  .also({"init_method_std"}));
  f.push_back(F(
                  "model", "rms_norm_eps", [](ModelConfig& c) -> Slot { return &c.rms_norm_eps; },
                  "added to the mean square in RMSNorm")
                  .range(0, 1)
                  .also({"norm_epsilon"}));
  f.push_back(F(
                  "model", "rope_theta", [](ModelConfig& c) -> Slot { return &c.rope_theta; },
                  "base of the rotary angles; also rope_parameters: {rope_type: default, rope_theta: ...}")
                  .above(0, 1e15)
                  .also({"rotary_base"}));
  f.push_back(F(
      "model", "use_bias", [](ModelConfig& c) -> Slot { return &c.use_bias; },
      "bias in attention, dense MLP, shared experts and the head of a MoE model"));
  f.push_back(F(
      "model", "tie_word_embeddings", [](ModelConfig& c) -> Slot { return &c.tie_word_embeddings; },
      "the head is the embedding"));
  f.push_back(F(
                  "model", "pad_token_id", [](ModelConfig& c) -> Slot { return &c.pad_token_id; },
                  "padding token, whose embedding gets no gradient from look-ups; -1 or null: none")
                  .range(-1, kMaxWidth));
  f.push_back(F(
                  "model", "bos_token_id", [](ModelConfig& c) -> Slot { return &c.bos_token_id; },
                  "token that begins a text; -1 or null: none")
                  .range(-1, kMaxWidth));
  f.push_back(F(
                  "model", "eos_token_id", [](ModelConfig& c) -> Slot { return &c.eos_token_id; },
                  "token that ends a text; -1 or null: none")
                  .range(-1, kMaxWidth));
}

void moe_fields(std::vector<F>& f) {
  f.push_back(F(
                  "model", "moe_num_experts", [](ModelConfig& c) -> Slot { return &c.moe_num_experts; },
                  "routed experts of a layer")
                  .range(0, kMaxExperts)
                  .also({"num_experts"})
                  .of_moe());
  f.push_back(F(
                  "model", "moe_k", [](ModelConfig& c) -> Slot { return &c.moe_k; }, "experts that a token goes to")
                  .range(1, kMaxExperts)
                  .also({"num_experts_per_tok", "moe_router_topk"})
                  .of_moe());
  f.push_back(F(
                  "model", "moe_intermediate_size", [](ModelConfig& c) -> Slot { return &c.moe_intermediate_size; },
                  "inner width of an expert; 0: intermediate_size")
                  .range(0, kMaxWidth)
                  .also({"moe_ffn_hidden_size"})
                  .of_moe());
  f.push_back(F(
                  "model", "moe_num_shared_experts", [](ModelConfig& c) -> Slot { return &c.moe_num_shared_experts; },
                  "experts that every token goes to, as one MLP of their joint width")
                  .range(0, kMaxExperts)
                  .also({"n_shared_experts"})
                  .of_moe());
  f.push_back(F(
                  "model", "moe_layer_start_index", [](ModelConfig& c) -> Slot { return &c.moe_layer_start_index; },
                  "first layer that may hold experts")
                  .range(0, kMaxLayers)
                  .of_moe());
  f.push_back(F(
                  "model", "moe_layer_end_index", [](ModelConfig& c) -> Slot { return &c.moe_layer_end_index; },
                  "last layer that may hold experts; -1: the last of the model; may be beyond it")
                  .range(-1, kMaxLayers)
                  .of_moe());
  f.push_back(F(
                  "model", "moe_layer_interval", [](ModelConfig& c) -> Slot { return &c.moe_layer_interval; },
                  "of these, layer i holds experts if (i + 1) % interval is 0")
                  .range(1, kMaxLayers)
                  .of_moe());
  f.push_back(F(
                  "model", "moe_gate", [](ModelConfig& c) -> Slot { return enum_slot(c.moe_gate, kGateNames); },
                  "how a token chooses its experts")
                  .or_null()
                  .of_moe());
  f.push_back(F(
                  "model", "scoring_func",
                  [](ModelConfig& c) -> Slot { return enum_slot(c.scoring_func, kScoringNames); },
                  "what makes scores of the router's logits")
                  .also({"moe_gate_act", "moe_router_score_function"})
                  .or_null()
                  .of_moe());
  f.push_back(F(
                  "model", "moe_use_aux_free", [](ModelConfig& c) -> Slot { return &c.moe_use_aux_free; },
                  "choices look at scores plus the correction bias; weights never do")
                  .also({"moe_router_enable_expert_bias"})
                  .or_null()
                  .of_moe());
  f.push_back(F(
                  "model", "moe_router_bias_update_rate",
                  [](ModelConfig& c) -> Slot { return &c.moe_router_bias_update_rate; },
                  "after each step the correction bias of an expert rises by this if it got less tokens than the mean, "
                  "and falls if more; 0: it stays")
                  .range(0, 1e3)
                  .also({"moe_use_aux_free_update_coef"})
                  .or_null()
                  .of_moe());
  f.push_back(F(
                  "model", "moe_group_experts", [](ModelConfig& c) -> Slot { return &c.moe_group_experts; },
                  "group gating: moe_k groups of experts, one choice in each")
                  .or_null()
                  .of_moe());
  f.push_back(F(
                  "model", "sinkhorn_2gate", [](ModelConfig& c) -> Slot { return &c.sinkhorn_2gate; },
                  "in training, second choices of gate top2 fill the room that first ones leave (other gates do not "
                  "read it)")
                  .or_null()
                  .of_moe());
  f.push_back(F(
                  "model", "sinkhorn_temp", [](ModelConfig& c) -> Slot { return &c.sinkhorn_temp; },
                  "temperature of sinkhorn_2gate")
                  .above(0, 1e6)
                  .or_null()
                  .of_moe());
  f.push_back(
      F(
          "model", "moe_capacity", [](ModelConfig& c) -> Slot { return &c.moe_capacity; },
          "factors: an expert has room for int(factor x tokens of the routing unit / moe_num_experts), at least "
          "1, in training, evaluation, and evaluation of fewer tokens than experts; empty: nothing is dropped. "
          "Generation drops nothing")
          .above(0, 1e9)
          .of_moe());
  f.push_back(F(
                  "model", "moe_drop_order",
                  [](ModelConfig& c) -> Slot { return enum_slot(c.moe_drop_order, kDropOrderNames); },
                  "who gets the room of a full expert")
                  .or_null()
                  .of_moe());
  f.push_back(F(
                  "model", "moe_reverse_token_drop", [](ModelConfig& c) -> Slot { return &c.moe_reverse_token_drop; },
                  "the last tokens come first there")
                  .also({"enable_reverse_token_drop"})
                  .or_null()
                  .of_moe());
  f.push_back(F(
                  "model", "moe_norm_gate_logits", [](ModelConfig& c) -> Slot { return &c.moe_norm_gate_logits; },
                  "divide the weights of a token's experts by their sum")
                  .or_null()
                  .of_moe());
  f.push_back(F(
                  "model", "moe_norm_min", [](ModelConfig& c) -> Slot { return &c.moe_norm_min; },
                  "least sum that the chosen weights are divided by")
                  .above(0, 1)
                  .of_moe());
  f.push_back(F(
                  "model", "router_aux_loss_coef", [](ModelConfig& c) -> Slot { return &c.router_aux_loss_coef; },
                  "weight of the router's balance loss")
                  .range(0, 1e6)
                  .also({"moe_aux_loss_lambda", "moe_aux_loss_coeff"})
                  .of_moe());
  f.push_back(F(
                  "model", "output_router_logits", [](ModelConfig& c) -> Slot { return &c.output_router_logits; },
                  "add the balance loss to the loss that is differentiated, as Hugging Face does; see "
                  "training.balance_loss")
                  .of_moe());
  f.push_back(F(
                  "model", "moe_aux_loss_per_layer", [](ModelConfig& c) -> Slot { return &c.moe_aux_loss_per_layer; },
                  "add the balance loss of each layer, as Baidu's trainers do; see training.balance_loss")
                  .or_null()
                  .of_moe());
  f.push_back(F(
                  "model", "router_z_loss_coef", [](ModelConfig& c) -> Slot { return &c.router_z_loss_coef; },
                  "weight of the mean squared logsumexp of the router's logits, summed over layers")
                  .range(0, 1e6)
                  .also({"moe_z_loss_lambda", "moe_z_loss_coeff"})
                  .or_null()
                  .of_moe());
  f.push_back(F(
                  "model", "moe_orthogonal_loss_lambda",
                  [](ModelConfig& c) -> Slot { return &c.moe_orthogonal_loss_lambda; },
                  "weight of the orthogonal loss of the routers' rows, summed over layers; see training.orthogonal")
                  .range(0, 1e6)
                  .or_null()
                  .of_moe());
  f.push_back(F(
                  "model", "moe_group_orthogonal_loss",
                  [](ModelConfig& c) -> Slot { return &c.moe_group_orthogonal_loss; },
                  "with moe_group_experts, rows of one group only are compared")
                  .or_null()
                  .of_moe());
}

void mtp_fields(std::vector<F>& f) {
  f.push_back(F(
                  "model", "num_nextn_predict_layers",
                  [](ModelConfig& c) -> Slot { return &c.num_nextn_predict_layers; },
                  "blocks of multi-token prediction; 0: none")
                  .range(0, kMostMtpLayers)
                  .also({"mtp_num_layers"}));
  f.push_back(F(
                  "model", "mtp_loss_scaling_factor", [](ModelConfig& c) -> Slot { return &c.mtp_loss_scaling_factor; },
                  "weight of their mean loss")
                  .range(0, 1e6)
                  .also({"multi_token_pred_lambda"}));
  f.push_back(F(
      "model", "mtp_hidden", [](ModelConfig& c) -> Slot { return enum_slot(c.mtp_hidden, kMtpHiddenNames); },
      "the hidden state that the first block reads"));
  f.push_back(F(
      "model", "mtp_positions", [](ModelConfig& c) -> Slot { return enum_slot(c.mtp_positions, kMtpPositionsNames); },
      "the positions of a block"));
}

bool is(const Value& v, std::initializer_list<const char*> words) {
  return v.is_null() ||
         (v.is_scalar() && std::any_of(words.begin(), words.end(), [&](const char* w) { return v.text == w; }));
}
bool is_off(const Value& v) { return is(v, {"false", "False"}); }
bool is_on(const Value& v) { return is(v, {"true", "True"}); }
bool is_number(const Value& v, double wanted) {
  if (v.is_null()) return true;
  if (v.kind != Value::Kind::kPlain || v.text.empty()) return false;
  char* end = nullptr;
  const double x = std::strtod(v.text.c_str(), &end);
  return *end == 0 && x == wanted;
}
bool is_zero(const Value& v) { return is_number(v, 0); }
bool is_one(const Value& v) { return is_number(v, 1); }
bool is_null(const Value& v) { return v.is_null(); }

}  // namespace

const std::vector<Field<ModelConfig>>& model_fields() {
  static const std::vector<F> fields = [] {
    std::vector<F> f;
    dense_fields(f);
    moe_fields(f);
    mtp_fields(f);
    for (F& field : f) field.decides = true;
    return f;
  }();
  return fields;
}

namespace {

// A config.json is only a claim. Below these bounds, counts and sizes in bytes fit 64 bits with room to spare.
constexpr int64_t kMostExperts = int64_t{1} << 22;
constexpr double kMostParameters = 0x1p48;

bool has_experts(const ModelConfig& c) { return c.model_type == ModelType::kErnie45Moe && c.moe_num_experts > 0; }

int64_t layers(const ModelConfig& c) { return c.num_hidden_layers + c.num_nextn_predict_layers; }

// Rules are asked before head_dim is resolved.
int64_t head_width(const ModelConfig& c) { return c.head_dim > 0 ? c.head_dim : c.hidden_size / c.num_attention_heads; }

// The matrices, from above: as if each layer had both a dense MLP and experts.
double parameters(const ModelConfig& c) {
  const auto real = [](int64_t x) { return static_cast<double>(x); };
  const double heads = real(2 * c.num_attention_heads + 2 * c.num_key_value_heads) * real(head_width(c));
  const double experts = real(c.moe_num_experts + c.moe_num_shared_experts) * real(c.moe_intermediate_size);
  const double mlp = 3 * (real(c.intermediate_size) + experts);
  const double mtp = real(c.num_nextn_predict_layers) * 2 * real(c.hidden_size);  // mtp_linear_proj
  return real(c.hidden_size) * (real(layers(c)) * (heads + mlp) + mtp + 2 * real(c.vocab_size));
}

}  // namespace

const std::vector<Rule<ModelConfig>>& model_rules() {
  using R = Rule<ModelConfig>;
  static const auto token = [](int64_t id, int64_t vocab) {
    return fmt::format("{} is not below vocab_size = {}", id, vocab);
  };
  static const std::string token_fix = "Choose an id of the vocabulary, or -1 for none";
  static const std::vector<R> rules = {
      {{"num_attention_heads", "hidden_size"},
       "without head_dim, hidden_size is a multiple of num_attention_heads",
       [](const ModelConfig& c) { return c.head_dim > 0 || c.hidden_size % c.num_attention_heads == 0; },
       [](const ModelConfig& c) {
         return fmt::format("{} heads do not divide hidden_size = {}", c.num_attention_heads, c.hidden_size);
       },
       "Change one of them, or give head_dim"},
      {{"num_key_value_heads", "num_attention_heads"},
       "num_attention_heads is a multiple of num_key_value_heads",
       [](const ModelConfig& c) { return c.num_attention_heads % c.num_key_value_heads == 0; },
       [](const ModelConfig& c) {
         return fmt::format("{} does not divide num_attention_heads = {}", c.num_key_value_heads,
                            c.num_attention_heads);
       },
       "Every key and value head serves the same number of query heads"},
      {{"head_dim", "num_attention_heads", "hidden_size"},
       "head_dim is even",
       [](const ModelConfig& c) {
         const bool divides = c.hidden_size % c.num_attention_heads == 0;  // else another rule says so
         return (c.head_dim == 0 && !divides) || head_width(c) % 2 == 0;
       },
       [](const ModelConfig& c) { return fmt::format("head_dim = {} is odd", head_width(c)); },
       "Rotary embedding turns pairs: choose an even number"},
      {{"moe_k", "moe_num_experts"},
       "moe_k <= moe_num_experts, if there are experts",
       [](const ModelConfig& c) {
         return c.model_type != ModelType::kErnie45Moe || c.moe_num_experts == 0 || c.moe_k <= c.moe_num_experts;
       },
       [](const ModelConfig& c) {
         return fmt::format("{} is more than moe_num_experts = {}", c.moe_k, c.moe_num_experts);
       },
       "A token cannot go to more experts than there are"},
      {{"moe_gate", "moe_k"},
       "gate top2 (and with it sinkhorn_2gate) chooses moe_k = 2 experts",
       [](const ModelConfig& c) { return !has_experts(c) || c.moe_gate != RouterGate::kTop2 || c.moe_k == 2; },
       [](const ModelConfig& c) { return fmt::format("top2 chooses 2 experts, but moe_k = {}", c.moe_k); },
       "Set moe_gate to topk, or moe_k to 2"},
      {{"scoring_func", "moe_gate"},
       "gate top2 takes softmax scores",
       [](const ModelConfig& c) {
         return !has_experts(c) || c.moe_gate != RouterGate::kTop2 || c.scoring_func == RouterScoring::kSoftmax;
       },
       [](const ModelConfig&) { return std::string("sigmoid, but moe_gate is top2"); },
       "Set scoring_func to softmax, or moe_gate to topk"},
      {{"moe_group_experts", "moe_num_experts", "moe_k"},
       "group gating: gate topk, softmax scores, moe_num_experts a multiple of moe_k",
       [](const ModelConfig& c) {
         return !has_experts(c) || !c.moe_group_experts ||
                (c.moe_gate == RouterGate::kTopK && c.scoring_func == RouterScoring::kSoftmax &&
                 c.moe_num_experts % c.moe_k == 0);
       },
       [](const ModelConfig& c) {
         if (c.moe_gate != RouterGate::kTopK) return std::string("true, but moe_gate is top2");
         if (c.scoring_func != RouterScoring::kSoftmax) return std::string("true, but scoring_func is sigmoid");
         return fmt::format("true, but {} experts do not make {} equal groups", c.moe_num_experts, c.moe_k);
       },
       "Set it to false, or change what contradicts it"},
      {{"moe_capacity"},
       "moe_capacity is empty, or three factors",
       [](const ModelConfig& c) { return c.moe_capacity.empty() || c.moe_capacity.size() == 3; },
       [](const ModelConfig& c) { return fmt::format("{} numbers, wanted three", c.moe_capacity.size()); },
       "Write [training, evaluation, evaluation of few tokens], as in [8, 8, 8]"},
      {{"moe_router_bias_update_rate", "moe_use_aux_free"},
       "moe_router_bias_update_rate > 0 needs moe_use_aux_free",
       [](const ModelConfig& c) { return !has_experts(c) || c.moe_router_bias_update_rate == 0 || c.moe_use_aux_free; },
       [](const ModelConfig& c) {
         return fmt::format("{}, but moe_use_aux_free is false", print_double(c.moe_router_bias_update_rate));
       },
       "Set it to 0, or moe_use_aux_free to true"},
      {{"pad_token_id", "vocab_size"},
       "pad_token_id < vocab_size",
       [](const ModelConfig& c) { return c.pad_token_id < c.vocab_size; },
       [](const ModelConfig& c) { return token(c.pad_token_id, c.vocab_size); },
       token_fix},
      {{"bos_token_id", "vocab_size"},
       "bos_token_id < vocab_size",
       [](const ModelConfig& c) { return c.bos_token_id < c.vocab_size; },
       [](const ModelConfig& c) { return token(c.bos_token_id, c.vocab_size); },
       token_fix},
      {{"eos_token_id", "vocab_size"},
       "eos_token_id < vocab_size",
       [](const ModelConfig& c) { return c.eos_token_id < c.vocab_size; },
       [](const ModelConfig& c) { return token(c.eos_token_id, c.vocab_size); },
       token_fix},
      {{"moe_num_experts", "num_hidden_layers"},
       "at most 2^22 experts over all layers",
       [](const ModelConfig& c) { return c.moe_num_experts * layers(c) <= kMostExperts; },
       [](const ModelConfig& c) {
         return fmt::format("{} experts in {} layers are more than {}", c.moe_num_experts, layers(c), kMostExperts);
       },
       "Lower one of them"},
      {{"hidden_size", "num_hidden_layers", "intermediate_size", "moe_intermediate_size", "moe_num_experts"},
       "at most 2^48 parameters",
       [](const ModelConfig& c) { return parameters(c) <= kMostParameters; },
       [](const ModelConfig& c) { return fmt::format("the model would have {:.1e} parameters", parameters(c)); },
       "Lower the sizes: no machine holds them"},
  };
  return rules;
}

const std::vector<std::string>& ignored_model_keys() {
  static const std::vector<std::string> keys = {
      // What Hugging Face writes beside the model's own fields.
      "architectures",
      "auto_map",
      "transformers_version",
      "dtype",
      "torch_dtype",
      "use_cache",
      "_name_or_path",
      "name_or_path",
      "_commit_hash",
      "_attn_implementation",
      "_attn_implementation_autoset",
      "attn_implementation",
      "return_dict",
      "return_dict_in_generate",
      "output_attentions",
      "output_hidden_states",
      "output_scores",
      "torchscript",
      "tokenizer_class",
      "id2label",
      "label2id",
      "num_labels",
      "problem_type",
      "task_specific_params",
      "finetuning_task",
      "is_decoder",
      "is_encoder_decoder",
      "chunk_size_feed_forward",
      "use_bfloat16",
      "keys_to_ignore_at_inference",
      "sep_token_id",
      "cls_token_id",
      "mask_token_id",
      "unk_token_id",
      "max_length",
      "min_length",
      "do_sample",
      "temperature",
      "top_p",
      "top_k",
      "repetition_penalty",
      // How Baidu's tools lay a model out or compute it; the result is the same.
      "paddleformers_version",
      "paddlenlp_version",
      "tensor_parallel_output",
      "tensor_parallel_degree",
      "sequence_parallel",
      "use_recompute",
      "recompute",
      "recompute_granularity",
      "recompute_use_reentrant",
      "pp_seg_method",
      "use_flash_attention",
      "use_flash_attn",
      "use_sparse_flash_attn",
      "use_mem_eff_attn",
      "use_rmsnorm",
      "fuse_linear",
      "fuse_rope",
      "fuse_rms_norm",
      "fuse_swiglu",
      "fuse_softmax_mask",
      "fuse_attn_qkv",
      "fuse_attn_ffn",
      "fuse_gate_detach_matmul",
      "use_fused_head_and_loss_fn",
      "use_sparse_head_and_loss_fn",
      "use_filtered_label_loss",
      "loss_subbatch_seqlen",
      "ignored_index",
      "moe_group",
      "moe_logging",
      "moe_dense_experts_token_type_id",
      "moe_layer_num",
      "weight_share_add_bias",
      "enable_mtp_magic_send",
  };
  return keys;
}

const std::vector<std::string>& layout_model_keys() {
  static const std::vector<std::string> keys = {
      "tensor_parallel_output", "tensor_parallel_degree",  "sequence_parallel", "use_recompute", "recompute",
      "recompute_granularity",  "recompute_use_reentrant", "pp_seg_method",
  };
  return keys;
}

const std::vector<LimitedKey>& limited_model_keys() {
  static const std::vector<LimitedKey> keys = {
      {"use_moe", "true", is_on, "a dense model is written moe_num_experts: 0, or model_type ernie4_5"},
      {"moe_use_hard_gate", "false", is_off, "the hard gate by token type is not supported yet"},
      {"moe_use_token_type_bias", "false", is_off, "the token-type bias of the router is not supported yet"},
      {"global_aux_loss", "false", is_off, "training.routing_unit: global is what counts over all ranks here"},
      {"moe_dropout_prob", "0", is_zero, "dropout is not supported yet"},
      {"attention_dropout", "0", is_zero, "dropout is not supported yet"},
      {"attention_probs_dropout_prob", "0", is_zero, "dropout is not supported yet"},
      {"hidden_dropout_prob", "0", is_zero, "dropout is not supported yet"},
      {"remove_tail_layer", "0", is_zero, "empty tail layers are not supported: write the real num_hidden_layers"},
      {"num_empty_layers_add_in_tail", "0", is_zero,
       "empty tail layers are not supported: write the real num_hidden_layers"},
      {"compression_ratio", "1", is_one, "scaled positions are not supported yet"},
      {"rope_reorder", "false", is_off, "the half-split rotary layout is not supported yet"},
      {"rope_3d", "false", is_off, "multimodal positions are not supported yet"},
      {"partial_rotary_factor", "1", is_one, "rotating a part of the head is not supported yet"},
      {"sliding_window", "null", is_null, "sliding-window attention is not supported yet"},
      {"quantization_config", "null", is_null, "quantised weights are not supported yet"},
      {"vision_config", "null", is_null, "multimodal models are not supported yet"},
      {"text_config", "null", is_null, "multimodal models are not supported yet"},
  };
  return keys;
}

ModelConfig default_model_config(ModelType type, bool old_generation) {
  ModelConfig c;
  c.model_type = type;
  if (type == ModelType::kErnie45) {
    c.hidden_size = 1024;
    c.intermediate_size = 3072;
    c.num_hidden_layers = 18;
    c.num_attention_heads = 16;
    c.num_key_value_heads = 2;
    c.head_dim = 128;
  } else if (old_generation) {
    c.vocab_size = 32000;
    c.hidden_size = 768;
    c.intermediate_size = 11008;
    c.num_hidden_layers = 2;
    c.num_attention_heads = 2;
    c.num_key_value_heads = 0;  // as many as query heads
    c.max_position_embeddings = 32768;
    c.rms_norm_eps = 1e-6;
    c.rope_theta = 10000.0;
    c.tie_word_embeddings = false;
    c.moe_k = 2;
    c.moe_intermediate_size = 3584;
    c.moe_num_shared_experts = 0;
    c.moe_layer_start_index = 0;
    c.moe_layer_interval = 2;
    c.mtp_loss_scaling_factor = 1.0;
    c.moe_gate = RouterGate::kTop2;
    c.sinkhorn_2gate = true;
    c.moe_use_aux_free = false;
  }
  return c;
}

}  // namespace concerto
