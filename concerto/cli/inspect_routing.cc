// `concerto inspect routing`: one MoE layer laid open on a text (layers/inspection.h).
#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "concerto/checkpoint/store_tensors.h"
#include "concerto/cli/backends.h"
#include "concerto/cli/inspect_command.h"
#include "concerto/cli/model_folder.h"
#include "concerto/cli/option_checks.h"
#include "concerto/data/tokenizer.h"
#include "concerto/layers/inspection.h"
#include "concerto/layers/router_stats.h"
#include "concerto/tensor/values.h"
#include "concerto/train/executor.h"
#include "concerto/train/memory_report.h"

namespace concerto {
namespace {

struct RoutingArguments {
  std::string model, prompt, dtype = "f32", backend = "cpu";
  std::vector<int32_t> ids;
  int layer = -1;
  RunSection run;  // threads and cores
  bool training = false, values = false, json = false;
};

// What the layer's router reads.
class InputRecorder final : public Observer {
 public:
  explicit InputRecorder(int layer) : name_("router." + std::to_string(layer) + ".input") {}
  bool wants_logits() const override { return false; }
  void record(const std::string& name, View value) override {
    if (name != name_) return;
    memory_ = Buffer(value.bytes());
    input = View(memory_.data(), value.shape, value.dtype);
    for (int64_t r = 0; r < value.rows(); ++r) {
      const View from = value.rows_range(r, 1), to = input.rows_range(r, 1);
      std::copy_n(static_cast<const char*>(from.data), to.bytes(), static_cast<char*>(to.data));
    }
  }
  View input;

 private:
  std::string name_;
  Buffer memory_;
};

std::vector<int32_t> token_ids(const RoutingArguments& a, const std::string& dir, const ModelConfig& m) {
  if (a.prompt.empty() == a.ids.empty())
    throw Error(ErrorCode::kUsage, "inspect routing", "wants --prompt or --ids, one of them",
                "For example: --prompt 'In the beginning'.");
  std::vector<int32_t> ids = a.ids;
  if (!a.prompt.empty()) ids = Tokenizer::load(dir).encode(a.prompt);
  if (ids.empty()) throw Error(ErrorCode::kUsage, "--prompt", "holds no token", "Give a longer text.");
  for (const int32_t id : ids)
    if (id < 0 || id >= m.vocab_size)
      throw Error(ErrorCode::kUsage, a.prompt.empty() ? "--ids" : dir,
                  fmt::format("the id {} is not one of the vocabulary's {}", id, m.vocab_size),
                  "Use ids and tokenizer of the model.");
  if (static_cast<int64_t>(ids.size()) > m.max_position_embeddings)
    throw Error(ErrorCode::kUsage, a.prompt.empty() ? "--ids" : "--prompt",
                fmt::format("{} tokens are more than the model's max_position_embeddings = {}", ids.size(),
                            m.max_position_embeddings),
                "Give fewer.");
  return ids;
}

int layer_of(const RoutingArguments& a, const ModelConfig& m, const std::string& dir) {
  std::string layers;
  int first = -1;
  for (int i = 0; i < m.num_hidden_layers; ++i) {
    if (!m.is_moe_layer(i)) continue;
    if (i == a.layer) return i;
    if (first < 0) first = i;
    layers += (layers.empty() ? "" : ", ") + std::to_string(i);
  }
  if (first < 0) throw Error(ErrorCode::kModel, dir, "has no MoE layer", "Give a mixture-of-experts model.");
  if (a.layer >= 0)
    throw Error(ErrorCode::kUsage, "--layer", fmt::format("{} holds no experts", a.layer),
                fmt::format("MoE layers: {}.", layers));
  return first;
}

// The padded form has a row for each slot of each expert, in the dispatched rows, in the experts' products and in what
// is printed of them.
void check_buffers(const GateSettings& s, const ModelConfig& m, int64_t tokens, DType type) {
  const int64_t room = s.capacity ? expert_room(*s.capacity, s.training, tokens, m.moe_num_experts) : tokens;
  const double rows = static_cast<double>(room) * static_cast<double>(m.moe_num_experts);
  const auto width = static_cast<double>(2 * m.hidden_size + 3 * m.moe_intermediate_size);
  const double bytes = rows * (width * static_cast<double>(dtype_bytes(type)) + 8 * static_cast<double>(m.hidden_size));
  const int64_t available = read_available_memory();
  if (rows <= INT32_MAX && (available <= 0 || bytes < static_cast<double>(available))) return;
  throw Error(ErrorCode::kMemory, s.capacity ? "moe_capacity" : "inspect routing",
              fmt::format("room for {} rows in each of {} experts would take {:.3g} bytes of padded buffers", room,
                          m.moe_num_experts, bytes),
              s.capacity
                  ? fmt::format("Lower it (nothing is dropped from {} on), or give fewer tokens.", m.moe_num_experts)
                  : std::string("Give fewer tokens."));
}

void print_part(const RoutingArguments& a, const char* name, View v) {
  const std::vector<double> all = to_doubles(v);
  const auto [low, high] = std::minmax_element(all.begin(), all.end());
  if (a.json) {
    nlohmann::ordered_json line{{"part", name}, {"shape", nlohmann::json::array()}, {"dtype", dtype_name(v.dtype)}};
    for (int i = 0; i < v.shape.rank(); ++i) line["shape"].push_back(v.dim(i));
    if (!all.empty()) line["min"] = *low, line["max"] = *high;
    if (a.values) line["values"] = all;
    fmt::print("{}\n", line.dump());
    return;
  }
  fmt::print("{:<22} {:<16} {:<5} {:>12.6g} {:>12.6g}\n", name, v.shape.str(), dtype_name(v.dtype), *low, *high);
  if (!a.values) return;
  for (int64_t r = 0; r < v.rows(); ++r) {
    std::string text;
    for (int64_t c = 0; c < v.cols(); ++c) text += fmt::format(" {:.6g}", all[static_cast<size_t>(r * v.cols() + c)]);
    fmt::print("  {}\n", text);
  }
}

void print_choices(const GateAndDispatch& g, const std::vector<int32_t>& ids) {
  const int64_t k = g.expert_ids.dim(1);
  const std::vector<double> weights = to_doubles(g.combine_weights);
  fmt::print("\ntoken       id  expert:weight, * dropped\n");
  for (size_t t = 0; t < ids.size(); ++t) {
    std::string text;
    for (int64_t j = 0; j < k; ++j) {
      const auto i = t * static_cast<size_t>(k) + static_cast<size_t>(j);
      text += fmt::format("  {}:{:.4f}{}", g.expert_ids.as<int32_t>()[i], weights[i],
                          g.slots.as<int32_t>()[i] < 0 ? "*" : "");
    }
    fmt::print("{:>5} {:>8}{}\n", t, ids[t], text);
  }
}

void run_inspect_routing(const RoutingArguments& a) {
  const std::string dir = model_folder(a.model);
  const ModelConfig m = load_model_config(dir);
  const int layer = layer_of(a, m, dir);
  const std::vector<int32_t> ids = token_ids(a, dir, m);
  const auto tokens = static_cast<int32_t>(ids.size());
  const GateSettings settings = gate_settings(m, a.training);
  check_buffers(settings, m, tokens, compute_dtype(a.dtype));
  ThreadPool pool(a.run.threads, pinned_cores(a.run));
  const auto store = load_hf_store(dir, m, compute_dtype(a.dtype), StoreUse::kInfer);
  const Stage stage(m, *store, Recompute::kNone, tokens);
  Executor executor(stage, *store, backend_by_name(a.backend), pool, {.max_tokens = tokens, .train = false});
  MicroBatch batch{.token_ids = ids,
                   .positions = {},
                   .targets = std::vector<int32_t>(ids.size(), kIgnoreIndex),
                   .doc_offsets = {0, tokens},
                   .row_offsets = {0, tokens},
                   .mtp_token_ids = {},
                   .mtp_targets = {}};
  for (int32_t t = 0; t < tokens; ++t) batch.positions.push_back(t);
  InputRecorder recorder(layer);
  executor.set_observer(&recorder);
  StepOutput output;
  executor.evaluate(batch, output);

  const std::string p = "model.layers." + std::to_string(layer) + ".mlp.";
  const auto experts = static_cast<int>(m.moe_num_experts);
  const View w = store->weight(store->ref(p + "gate.weight"));
  const View bias = m.moe_use_aux_free
                        ? store->weight(store->ref(p + "moe_statics.e_score_correction_bias", {m.moe_num_experts}))
                        : View{};
  const Context& ctx = executor.ops();
  const GateAndDispatch g = gate_and_dispatch(ctx, settings, recorder.input, w, bias);
  const View gate_up = store->weight(store->fused(p + "experts.0.gate_proj.weight", 2 * experts,
                                                  {experts, 2 * m.moe_intermediate_size, m.hidden_size}));
  const View down = store->weight(
      store->fused(p + "experts.0.down_proj.weight", experts, {experts, m.hidden_size, m.moe_intermediate_size}));
  const OwnedTensor done = forward_experts(ctx, g.dispatched_input, gate_up, down);
  const OwnedTensor combined = combine_expert_output(ctx, done.view, g.combine_weights, g.scatter_index);
  if (!a.json)
    fmt::print(
        "layer {}, {} tokens, {} experts, {} of them a token, room for {} rows an expert ({})\n\n{:<22} {:<16} "
        "{:<5} {:>12} {:>12}\n",
        layer, tokens, experts, m.moe_k, g.capacity, a.training ? "training" : "evaluation", "part", "shape", "type",
        "min", "max");
  print_part(a, "dispatched_input", g.dispatched_input);
  print_part(a, "combine_weights", g.combine_weights);
  print_part(a, "dispatch_mask", g.dispatch_mask);
  print_part(a, "scatter_index", g.scatter_index);
  print_part(a, "router_loss", g.router_loss);
  print_part(a, "gate_logits", g.gate_logits);
  print_part(a, "gate_prob", g.gate_prob);
  print_part(a, "forward_experts", done.view);
  print_part(a, "combine_expert_output", combined.view);
  if (!a.json) print_choices(g, ids);
}

}  // namespace

void add_inspect_routing(CLI::App& inspect) {
  auto a = std::make_shared<RoutingArguments>();
  CLI::App* c = inspect.add_subcommand("routing",
                                       "the seven parts of a MoE layer's gate_and_dispatch on a text, its "
                                       "forward_experts and combine_expert_output");
  c->add_option("--model", a->model, "Hugging Face folder, or a run folder that holds one")->required();
  c->add_option("--prompt", a->prompt, "the text");
  c->add_option("--ids", a->ids, "token ids in place of a text, as in 5,17,3")->delimiter(',');
  c->add_option("--layer", a->layer, "a MoE layer; the first unless given")->check(whole_number(0, 1 << 16));
  c->add_flag("--training", a->training,
              "route in this layer as in training (capacity, Sinkhorn); the layers below route as in evaluation");
  c->add_flag("--values", a->values, "print every value");
  c->add_option("--dtype", a->dtype, "f32 | bf16")->check(CLI::IsMember({"f32", "bf16"}))->capture_default_str();
  c->add_option("--backend", a->backend, "cpu | ref")->capture_default_str();
  add_thread_options(*c, a->run);
  c->add_flag("--json", a->json, "print one JSON object a part");
  c->callback([a] { run_inspect_routing(*a); });
}

}  // namespace concerto
