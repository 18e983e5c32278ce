// What a plan must hold whatever the number of ranks. The rest is topology/layout.h's.
#include <algorithm>
#include <numeric>

#include "concerto/config/run_fields.h"

namespace concerto {
namespace {

using R = Rule<RunConfig>;

bool has_dense_layers(const ModelConfig& m) {
  return m.num_moe_layers() < m.num_hidden_layers || m.num_nextn_predict_layers > 0;
}

// What tp cuts, with its size; heads have rules of their own.
struct Cut {
  const char* name;
  int64_t size;
};
Cut narrowest_cut(const ModelConfig& m) {
  std::vector<Cut> cuts = {{"vocab_size", m.vocab_size}};
  if (has_dense_layers(m)) cuts.push_back({"intermediate_size", m.intermediate_size});
  if (m.num_moe_layers() > 0 && m.moe_num_shared_experts > 0)
    cuts.push_back({"width of the shared experts", m.shared_intermediate_size()});
  return *std::min_element(cuts.begin(), cuts.end(), [](const Cut& a, const Cut& b) { return a.size < b.size; });
}

int64_t experts(const ModelConfig& m) { return m.num_moe_layers() > 0 ? m.moe_num_experts : 0; }
int64_t expert_width(const ModelConfig& m) { return m.num_moe_layers() > 0 ? m.moe_intermediate_size : 0; }

// The two divisors of n around x: "3 or 6".
std::string divisors_near(int64_t n, int64_t x) {
  int64_t below = 1, above = n;
  for (int64_t d = 1; d <= n; ++d) {
    if (n % d != 0) continue;
    if (d <= x) below = d;
    if (d >= x) {
      above = d;
      break;
    }
  }
  return below == above || above < x ? fmt::format("{}", below) : fmt::format("{} or {}", below, above);
}

bool shares_kv_heads(const RunConfig& c) {
  const int64_t kv = c.model.config.num_key_value_heads, tp = c.parallel.tp;
  return kv % tp == 0 || tp % kv == 0;
}

bool schedule_takes_vpp(const ParallelSection& p) {
  if (p.schedule == "interleaved") return p.vpp > 1 || p.pp == 1;
  return p.vpp == 1 || (p.schedule == "zero_bubble_v" && p.vpp == 2);
}

}  // namespace

int64_t stages_of_a_rank(const ParallelSection& p) { return p.schedule == "zero_bubble_v" ? 2 : p.vpp; }
int64_t virtual_stages(const ParallelSection& p) { return p.pp * stages_of_a_rank(p); }

const std::vector<R>& parallel_rules() {
  static const std::vector<R> rules = {
      {{"parallel.cp"},
       "parallel.cp is 1: context parallelism is planned",
       [](const RunConfig& c) { return c.parallel.cp == 1; },
       [](const RunConfig& c) {
         return fmt::format("{} context parallel ranks: context parallelism is not built yet", c.parallel.cp);
       },
       "Set it to 1"},
      {{"parallel.tp", "model"},
       "tp divides num_attention_heads",
       [](const RunConfig& c) { return c.model.config.num_attention_heads % c.parallel.tp == 0; },
       [](const RunConfig& c) {
         const int64_t heads = c.model.config.num_attention_heads;
         return fmt::format("{} tensor parallel ranks do not divide the model's {} heads; {} would", c.parallel.tp,
                            heads, divisors_near(heads, c.parallel.tp));
       },
       "A rank holds whole heads"},
      {{"parallel.tp", "model"},
       "tp divides num_key_value_heads, or is a multiple of them (then ranks share key/value heads)",
       [](const RunConfig& c) { return shares_kv_heads(c); },
       [](const RunConfig& c) {
         return fmt::format("{} tensor parallel ranks can neither split nor share the model's {} key/value heads",
                            c.parallel.tp, c.model.config.num_key_value_heads);
       },
       "Choose a divisor or a multiple of num_key_value_heads"},
      {{"parallel.tp", "model"},
       "tp <= vocab_size and the widths of dense MLPs and shared experts (they need not divide by it)",
       [](const RunConfig& c) { return c.parallel.tp <= narrowest_cut(c.model.config).size; },
       [](const RunConfig& c) {
         const Cut cut = narrowest_cut(c.model.config);
         return fmt::format("{} tensor parallel ranks, but the model's {} is {}", c.parallel.tp, cut.name, cut.size);
       },
       "Lower it"},
      {{"parallel.ep", "model"},
       "ep <= moe_num_experts, 1 for a dense model (experts need not divide by it)",
       [](const RunConfig& c) { return c.parallel.ep <= std::max<int64_t>(1, experts(c.model.config)); },
       [](const RunConfig& c) {
         return fmt::format("{} expert parallel ranks, but the model has {} experts a layer", c.parallel.ep,
                            experts(c.model.config));
       },
       "Lower it"},
      {{"parallel.etp", "model"},
       "etp <= moe_intermediate_size, 1 for a dense model (the width need not divide by it)",
       [](const RunConfig& c) { return c.parallel.etp <= std::max<int64_t>(1, expert_width(c.model.config)); },
       [](const RunConfig& c) {
         return fmt::format("{} tensor parallel ranks inside an expert, but the model's experts are {} wide",
                            c.parallel.etp, expert_width(c.model.config));
       },
       "Lower it"},
      {{"parallel.zero", "parallel.pp"},
       "`zero: 2` only with pp = 1",
       [](const RunConfig& c) { return c.parallel.zero < 2 || c.parallel.pp == 1; },
       [](const RunConfig& c) {
         return fmt::format(
             "stage 2 with {} pipeline stages: gradients that are split after each micro-batch would be sent once a "
             "micro-batch instead of once a step",
             c.parallel.pp);
       },
       "Set it to 1, or pp to 1"},
      {{"optimizer.moments_dtype", "parallel.tp", "parallel.etp"},
       "`moments_dtype: bf16` only with tp = 1 and etp = 1",
       [](const RunConfig& c) {
         return c.optimizer.moments_dtype != "bf16" || (c.parallel.tp == 1 && c.parallel.etp == 1);
       },
       [](const RunConfig& c) {
         return fmt::format(
             "bf16 with tensors cut among ranks (tp {}, etp {}): the draws that round moments are numbered by an "
             "element's place in a whole tensor",
             c.parallel.tp, c.parallel.etp);
       },
       "Set it to f32, or tp and etp to 1"},
      {{"parallel.zero", "parallel.schedule", "parallel.dispatch_buffer_mib"},
       "`zero: 2` with dispatch_buffer_mib only where weight gradients are not put off (schedule 1f1b)",
       [](const RunConfig& c) {
         return c.parallel.zero < 2 || c.parallel.dispatch_buffer_mib == 0 || c.parallel.schedule == "1f1b" ||
                c.parallel.schedule == "interleaved";
       },
       [](const RunConfig& c) {
         return fmt::format(
             "stage 2 with schedule {} and a bound on dispatch: rows of later rounds make their weight gradients "
             "before "
             "those of other layers have left the memory that layers share",
             c.parallel.schedule);
       },
       "Use `schedule: 1f1b`, which on one pipeline stage is as fast"},
      {{"parallel.vpp", "parallel.schedule", "parallel.pp"},
       "`vpp` > 1 with `schedule: interleaved`, which needs it where pp > 1 (zero_bubble_v always has 2)",
       [](const RunConfig& c) { return schedule_takes_vpp(c.parallel); },
       [](const RunConfig& c) {
         return fmt::format("{} virtual stages a rank do not go with schedule {} on {} pipeline ranks", c.parallel.vpp,
                            c.parallel.schedule, c.parallel.pp);
       },
       "Use `vpp: 2` or more with interleaved, 1 with the others"},
      {{"parallel.stage_layers", "parallel.pp", "parallel.vpp", "parallel.schedule"},
       "stage_layers is empty, or has a number for each of the pp x vpp virtual stages",
       [](const RunConfig& c) {
         return c.parallel.stage_layers.empty() ||
                static_cast<int64_t>(c.parallel.stage_layers.size()) == virtual_stages(c.parallel);
       },
       [](const RunConfig& c) {
         return fmt::format("{} numbers of layers for {} virtual stages ({} ranks x {})",
                            c.parallel.stage_layers.size(), virtual_stages(c.parallel), c.parallel.pp,
                            stages_of_a_rank(c.parallel));
       },
       "Give one a virtual stage, in the order of the model; or [] to have them balanced"},
      {{"parallel.stage_layers", "model"},
       "the numbers of stage_layers sum to num_hidden_layers",
       [](const RunConfig& c) {
         const auto& n = c.parallel.stage_layers;
         return n.empty() || std::accumulate(n.begin(), n.end(), int64_t{0}) == c.model.config.num_hidden_layers;
       },
       [](const RunConfig& c) {
         const auto& n = c.parallel.stage_layers;
         return fmt::format("stages of {} layers together, but the model has {}",
                            std::accumulate(n.begin(), n.end(), int64_t{0}), c.model.config.num_hidden_layers);
       },
       "A stage may have 0; [] has them balanced"},
  };
  return rules;
}

}  // namespace concerto
